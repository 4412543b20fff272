"""``autotune doctor``: what is here, and what is missing for a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.doctor_finding import finding as _finding
from autotune.cli.options import DEFAULT_DB, Db, EngineName, Json, Routes, SpaceFile

if TYPE_CHECKING:
    from pathlib import Path

# A finding is fine, missing, or only worth knowing.
MARKS = {True: ("ok", "green"), False: ("missing", "bold red"), None: ("note", "dim")}


def command(
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="PROFILE", help="Check for this profile; whatever is here if left out."
        ),
    ] = None,
    engine: EngineName = "generic",
    space: SpaceFile = None,
    only: Routes = None,
    db: Db = DEFAULT_DB,
    json: Json = False,
) -> int:
    """Examine this machine: device, guarded memory, routes, kernels, database.

    With --gpu or --space it names what a run over that space lacks: modules that are not built, compiler,
    headers, precompiled kernels, each with what to do. It looks on a machine without that GPU too. Exit 1 if
    something is missing. The "facts" of --json are what Router.load(facts=...) compares with.
    """
    from rich.text import Text

    from autotune.cli.output import print_json, print_text

    kernels, kind = _kernels(gpu, engine, space, only)
    findings = [*_device(gpu), *_memory(), *_routes(), *_packages(kind), *kernels, *_database(db)]
    facts = next((item["facts"] for item in findings if "facts" in item), None)
    if json:
        shown = [{key: value for key, value in item.items() if key != "facts"} for item in findings]
        print_json({"facts": facts, "findings": shown})
    else:
        for item in findings:
            mark, style = MARKS[item["ok"]]
            print_text(Text.assemble((f"{mark:8}", style), f"{item['what']}: {item['detail']}"))
    return int(any(item["ok"] is False for item in findings))


def _kernels(
    gpu: str | None, engine: str, space: Path | None, only: str | None
) -> tuple[list[dict[str, Any]], str]:
    """What a run over the space lacks of kernels; and the device kind that it is for, "" if none."""
    from autotune.cli.context import all_routes, ask

    if gpu is None and space is None:
        return [], ""
    asked = ask(gpu, engine, space)
    kind = asked.grid.space.device.kind
    if kind != "cuda":
        return [], kind
    from autotune.cli.doctor_kernels import kernel_findings

    return kernel_findings(asked.grid, all_routes(kind, only), engine, space), kind


def _device(gpu: str | None) -> list[dict[str, Any]]:
    from autotune.domain.fingerprint import unknown
    from autotune.hardware.collect import collect
    from autotune.hardware.errors import HardwareError
    from autotune.hardware.match import present, require
    from autotune.space.library import profiles
    from autotune.space.space import load_profile

    try:
        facts = require(load_profile(gpu).device) if gpu else collect(threads=1)
    except HardwareError as error:
        return [_finding("device", False, str(error), facts=collect("cpu", threads=1).to_dict())]
    matching = [name for name in profiles() if load_profile(name).device.matches(facts)]
    found = [_finding("device", True, present(facts), facts=facts.to_dict())]
    for part in (facts.hardware, facts.software, facts.informative):
        found += [_finding(key, None, str(value)) for key, value in part.items()]
    found += [
        _finding(fact, False, "not known here: a router opens no table on this machine")
        for fact in unknown(facts)
    ]
    found.append(
        _finding("profile", bool(matching), ", ".join(matching) or "no --gpu profile names this device")
    )
    return found


def _memory() -> list[dict[str, Any]]:
    """A real guarded tensor, written to its last byte."""
    import torch

    from autotune.arena.base import Placement
    from autotune.arena.factory import default_kind, open_arena

    try:
        with open_arena(default_kind("cpu"), "cpu", Placement.TAIL) as arena:
            arena.tensor("probe", (3, 5), torch.float32).fill_(1.0)
            touched = arena.overwritten()
    except Exception as error:
        return [_finding("guarded memory", False, f"{type(error).__name__}: {error}")]
    return [_finding("guarded memory", not touched, f"{arena.kind}: mapped, written, canaries intact")]


def _routes() -> list[dict[str, Any]]:
    from autotune.routes import registry

    found = [_finding("routes", True, ", ".join(registry.routes()))]
    return found + [_finding("route", False, str(error)) for error in registry.load_errors()]


def _packages(kind: str) -> list[dict[str, Any]]:
    """Packages that only some runs need; without one that a ``kind`` of device needs, a run there fails."""
    from importlib.metadata import PackageNotFoundError, version

    gpu = "pip install 'kernel-autotune[gpu]'"
    found = []
    for name, purpose, needed in (
        ("flashinfer-python", f"CUDA routes: {gpu}", "cuda"),
        ("cuda-bindings", f"guarded CUDA memory: {gpu}", "cuda"),
        ("nvidia-ml-py", f"driver, power limit and MIG mode, which a table is bound to: {gpu}", "cuda"),
        ("psycopg", "a PostgreSQL store: pip install 'kernel-autotune[postgres]'", "never"),
    ):
        try:
            found.append(_finding(name, None, version(name)))
        except PackageNotFoundError:
            ok = False if kind == needed else None
            found.append(_finding(name, ok, f"not installed; needed for {purpose}"))
    return found


def _database(url: str) -> list[dict[str, Any]]:
    """Opens an existing database; does not make one."""
    from autotune.cli.context import missing_file
    from autotune.store.database import open_database
    from autotune.store.errors import StoreError
    from autotune.store.repository import Repository

    if (path := missing_file(url)) is not None:
        return [_finding("database", None, f"{path} does not exist yet; run makes it")]
    try:
        with open_database(url) as database:
            studies = Repository(database).studies()
            return [_finding("database", True, f"{database.where}: {len(studies)} studies")]
    except StoreError as error:
        return [_finding("database", False, str(error))]
