"""``autotune prebuild``: build the kernels that a run will ask for, or install built ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.options import EngineName, Gpu, Json, SpaceFile

if TYPE_CHECKING:
    from autotune.domain.cell import Column


def command(
    gpu: Gpu = None,
    engine: EngineName = "generic",
    space: SpaceFile = None,
    columns: Annotated[
        Path | None,
        typer.Option(
            "--columns",
            metavar="FILE",
            help="Exactly the modules for these columns, a JSON list of stored ones, instead of a space's; "
            "--gpu says for which device.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder of the modules and their manifest.")
    ] = Path("prebuilt"),
    route: Annotated[
        list[str] | None,
        typer.Option("--route", metavar="NAME", help="Only this route's modules; may be repeated."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=0, help="Modules at a time; 0: one a core.")] = 0,
    include: Annotated[
        list[Path] | None,
        typer.Option("--include", metavar="DIR", help="Look for CUDA headers here too; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--list", help="Name the modules, build nothing.")] = False,
    merge: Annotated[
        list[Path] | None,
        typer.Option(
            "--merge",
            metavar="DIR",
            help="Copy the modules of this folder, which prebuild wrote, into --out instead of building; "
            "may be repeated.",
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            metavar="DIR",
            help="Install the modules of --out, with their manifest, into this flashinfer package folder "
            "instead of building.",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Build FlashInfer's modules for a search space without a GPU, or install built ones (--into).

    Modules that are there already are skipped. Exit 1 if one failed, or does not fit what is installed.
    """
    if merge or into is not None:
        return _carry(merge or [], out, into, json)
    return _build(gpu, engine, space, columns, out, route, jobs, include or [], dry_run, json)


def _carry(sources: list[Path], out: Path, into: Path | None, json: bool) -> int:
    """Copies built modules: from ``sources`` to ``out``, and from there to where FlashInfer looks."""
    from autotune.cli.output import print_json, print_text
    from autotune.prebuild.install import install
    from autotune.prebuild.merge import merge

    merged = {str(source): merge(source, out) for source in sources}
    installed = None if into is None else install(out, into)
    if json:
        done: dict[str, Any] = {"folder": str(out), "merged": merged}
        if into is not None:
            done |= {"into": str(into), "installed": installed}
        print_json(done)
        return 0
    for source, copied in merged.items():
        print_text(f"{len(copied)} modules copied from {source} to {out}")
    if installed is not None:
        print_text(f"{len(installed)} modules installed from {out} into {into}")
    return 0


def _build(
    gpu: str | None,
    engine: str,
    space: Path | None,
    listed: Path | None,
    out: Path,
    only: list[str] | None,
    jobs: int,
    include: list[Path],
    dry_run: bool,
    json: bool,
) -> int:
    from autotune.cli.context import ask
    from autotune.cli.exits import CliError, Exit
    from autotune.cli.output import print_json, print_text, stderr
    from autotune.domain.fingerprint import Facts
    from autotune.prebuild.build import modules_of, prebuild
    from autotune.prebuild.toolchain import find
    from autotune.routes.flashinfer.catalogue import routes

    grid = ask(gpu, engine, space).grid
    device = grid.space.device
    if device.kind != "cuda":
        raise CliError(f"{grid.space.gpu} needs no prebuilt kernels; prebuild is for GPUs", Exit.USAGE)
    columns = grid.columns if listed is None else _listed(listed, space)
    # the self-test's module belongs to a space that is run
    selftest = not only and listed is None
    names = [item.name for item in routes()]
    if unknown := sorted(set(only or []) - set(names)):
        raise CliError(f"unknown route {unknown[0]!r}: there are {', '.join(names)}", Exit.USAGE)
    facts = Facts("cuda", {"compute_capability": device.compute_capability}, {})

    if dry_run:
        asked = modules_of(
            columns,
            facts,
            routes=only or names,
            selftest=selftest,
            work=out.with_name(out.name + ".work"),
        )
        if json:
            print_json({"asked": asked})
        else:
            print_text("\n".join(f"{name}  [{', '.join(by)}]" for name, by in asked.items()))
        return 0

    def say(event: str, values: dict[str, Any]) -> None:
        if event == "built":
            stderr.print(f"built {values['name']} ({values['seconds']:.0f} s)", soft_wrap=True)
        elif event == "failed":
            stderr.print(f"failed {values['name']}: {values['reason']}", soft_wrap=True)

    outcome = prebuild(
        columns,
        facts,
        find(include),
        out,
        routes=only or names,
        selftest=selftest,
        jobs=jobs,
        listen=say,
    )
    if json:
        print_json(
            {
                "folder": str(out),
                "flashinfer": outcome.manifest.flashinfer,
                "asked": outcome.asked,
                "built": outcome.built,
                "present": outcome.present,
                "failed": outcome.failed,
            }
        )
    else:
        print_text(
            f"{len(outcome.built)} modules built, {len(outcome.present)} there already, "
            f"{len(outcome.failed)} failed: {out} (FlashInfer {outcome.manifest.flashinfer})"
        )
    return int(bool(outcome.failed))


def _listed(path: Path, space: Path | None) -> list[Column]:
    """The columns of ``--columns``, which ask for modules in a space's stead."""
    from autotune.cli.exits import CliError, Exit
    from autotune.prebuild.columns import ColumnsError, read

    if space is not None:
        raise CliError("--columns and --space: give one of them", Exit.USAGE)
    try:
        return read(path)
    except ColumnsError as error:
        raise CliError(f"--columns: {error}", Exit.USAGE) from error
