"""Ask which modules a set of columns needs, or build them in parallel and keep the folder's manifest."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.hardware.flashinfer import cubin_folder
from autotune.prebuild import manifest as manifests
from autotune.prebuild.alone import alone
from autotune.prebuild.errors import PrebuildError
from autotune.prebuild.manifest import Manifest, Module
from autotune.prebuild.process import events
from autotune.prebuild.toolchain import Toolchain, stub_driver
from autotune.routes.flashinfer.environment import library_environment

# ``listen(event, values)``: see ``autotune.prebuild.child``; for a progress view.
Listen = Callable[[str, dict[str, Any]], None]


@dataclass(slots=True)
class Outcome:
    """What a prebuild did.

    Attributes:
        asked: module names, and the routes that load each.
        built, present: names.
        failed: name -> reason, one line each.
    """

    manifest: Manifest
    asked: dict[str, list[str]] = field(default_factory=dict)
    built: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def _request(columns: Sequence[Column], facts: Facts, routes: Sequence[str], **more: Any) -> dict[str, Any]:
    defaults = {"out": "", "known": {}, "cuda": "", "jobs": 1, "list_only": False, "selftest": False}
    return {
        **defaults,
        "columns": [column.to_dict() for column in columns],
        "facts": facts.to_dict(),
        "routes": list(routes),
        **more,
    }


def modules_of(
    columns: Sequence[Column],
    facts: Facts,
    *,
    routes: Sequence[str],
    work: Path,
    selftest: bool = False,
    python: str = sys.executable,
) -> dict[str, list[str]]:
    """Names of the modules that ``routes`` load for ``columns``, each with its routes. Needs no compiler.

    Args:
        selftest: with the module on which the self-test shows the real XQA kernel's fault.
        facts: ``hardware.compute_capability`` of the target device is enough.
        work: where FlashInfer may write its generated sources.
        python: the interpreter that has FlashInfer.

    Raises:
        PrebuildError: FlashInfer cannot be imported, or the process that asks died.
    """
    work = work.absolute()
    environment = library_environment(str(facts.hardware["compute_capability"]), work)
    request = _request(columns, facts, routes, list_only=True, selftest=selftest)
    found: dict[str, list[str]] = {}
    with contextlib.closing(events(python, request, environment, work)) as stream:
        for event, values in stream:
            if event == "asked":
                found = values["modules"]
    return found


def prebuild(
    columns: Sequence[Column],
    facts: Facts,
    toolchain: Toolchain,
    out: Path,
    *,
    routes: Sequence[str],
    jobs: int = 0,
    work: Path | None = None,
    selftest: bool = False,
    python: str = sys.executable,
    listen: Listen = lambda event, values: None,
) -> Outcome:
    """Build every module that ``routes`` load for ``columns`` into ``out`` (laid out as ``data/aot``).

    Modules that are there with the same recipe and content are skipped. The manifest is written after every
    module, so an interrupted prebuild goes on where it stopped; its compilers end with it.

    Args:
        facts: ``hardware.compute_capability`` of the target device is enough.
        jobs: modules at a time; 0 for one a core.
        work: objects and generated sources; ``<out>.work`` by default.
        selftest: with the module on which the self-test shows the real XQA kernel's fault.
        python: the interpreter that has FlashInfer.

    Raises:
        PrebuildError: FlashInfer cannot be imported, the folder belongs to another build or is in use, or the
            child died.
    """
    out, work = out.absolute(), (work or out.with_name(out.name + ".work")).absolute()
    with alone(work):
        try:
            return _build(columns, facts, toolchain, out, work, routes, jobs, selftest, python, listen)
        finally:
            _sweep(out, work)


def _build(
    columns: Sequence[Column],
    facts: Facts,
    toolchain: Toolchain,
    out: Path,
    work: Path,
    routes: Sequence[str],
    jobs: int,
    selftest: bool,
    python: str,
    listen: Listen,
) -> Outcome:
    """:func:`prebuild` in its folder."""
    arch = str(facts.hardware["compute_capability"])
    kept = manifests.read(out)
    stub = stub_driver(toolchain, work / "stub")
    request = _request(
        columns,
        facts,
        routes,
        out=str(out),
        known={
            name: {"recipe": module.recipe, "sha256": module.sha256, "head_dims": module.head_dims}
            for name, module in (kept.modules if kept else {}).items()
        },
        cuda=toolchain.cuda,
        jobs=jobs or os.cpu_count() or 1,
        selftest=selftest,
    )
    # its workspace is ours, and would hide cubins that were downloaded before
    cubins = {"FLASHINFER_CUBIN_DIR": str(cubin_folder())} if python == sys.executable else {}
    environment = {**library_environment(arch, work), **cubins, **toolchain.environment(stub)}
    outcome: Outcome | None = None
    # closed here, whatever ends the loop: no compiler may outlive the call
    with contextlib.closing(events(python, request, environment, work)) as stream:
        for event, values in stream:
            if event == "library":
                outcome = Outcome(_manifest(kept, values, toolchain, arch, out))
            elif outcome is not None:
                _record(outcome, event, values, out)
            listen(event, values)
    if outcome is None:
        raise PrebuildError(f"the build process said nothing (log: {work / 'prebuild.log'})")
    return outcome


def _sweep(out: Path, work: Path) -> None:
    """Remove what is half written, here and of calls that were killed.

    Objects that are whole stay in ``work``, where the next call goes on from them; ninja removes the others.
    """
    # by the very names that are written here: the folder may hold what is the user's
    partial = [path for path in out.glob("*/*.partial") if path.stem == path.parent.name]
    written = [path for path in out.glob(f"{manifests.NAME}.*") if path.suffix[1:].isdigit()]
    for path in (*partial, *written, work / "stub" / "libcuda.so.partial"):
        if not path.is_file():
            continue
        with contextlib.suppress(OSError):  # it must not hide how the build ended
            path.unlink()
        for folder in (path.parent, out):
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()


def _manifest(
    kept: Manifest | None, values: dict[str, Any], toolchain: Toolchain, arch: str, out: Path
) -> Manifest:
    new = Manifest(values["flashinfer"], values["commit"], values["tvm_ffi"], toolchain.cuda, arch)
    if kept is None:
        return new
    if kept.build_of() != new.build_of():
        raise PrebuildError(
            f"{out} holds modules of FlashInfer {' '.join(kept.build_of())} (version, commit, tvm-ffi, CUDA, "
            f"compute capability), not of {' '.join(new.build_of())}: give another folder"
        )
    return kept


def _record(outcome: Outcome, event: str, values: dict[str, Any], out: Path) -> None:
    if event == "asked":
        outcome.asked = values["modules"]
    elif event == "present":
        outcome.present.append(values["name"])
    elif event == "failed":
        outcome.failed[values["name"]] = values["reason"]
    elif event == "built":
        outcome.built.append(values["name"])
        module = Module(
            **{**values, "routes": tuple(values["routes"]), "head_dims": tuple(values["head_dims"])}
        )
        outcome.manifest.modules[module.name] = module
        outcome.manifest.write(out)
