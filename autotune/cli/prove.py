"""``autotune prove``: run checks of one route in one column again; what every stored repro command calls."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from typing import Annotated

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.options import Json
from autotune.domain.route_name import EMULATED
from autotune.domain.verdict import CheckResult, CheckStatus, Status, Verdict, conclude


def command(
    route: Annotated[str, typer.Argument(metavar="ROUTE", help="A registered route's name.")],
    column: Annotated[str, typer.Option("--column", metavar="JSON", help="The column, as stored.")],
    kv_lens: Annotated[
        str, typer.Option("--kv-lens", metavar="N,N,...", help="Total KV lengths over which checks spread.")
    ],
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="CHECK", help="One check; all of the column's if left out."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the operands.")] = 0,
    pad_value: Annotated[
        int | None,
        typer.Option("--pad-value", min=0, help="KV length of padded rows; the column's if left out."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="cpu|cuda", help="Where to run; the GPU, if there is one."),
    ] = None,
    json: Json = False,
) -> int:
    """Run one route's checks in one column, here and now; nothing is stored.

    What every stored repro command calls. Exit 1 unless all of them pass.
    """
    from autotune.arena.factory import default_kind
    from autotune.checks import registry as checks
    from autotune.cli.output import print_json, print_text
    from autotune.domain.cell import Column
    from autotune.hardware.collect import collect
    from autotune.worker.jobs import ProveJob, child_route, prove
    from autotune.worker.worker import Worker

    try:
        asked = Column.from_dict(json_module.loads(column))
        if pad_value is not None:
            asked = replace(asked, pad_value=pad_value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(
            f"--column is not a stored column: {type(error).__name__}: {error}", Exit.USAGE
        ) from error
    lens = _lens(kv_lens, asked.max_context)
    try:
        child_route(route)
        facts = collect(device, threads=1)
        if route.startswith(EMULATED):
            from autotune.routes.flashinfer.emulation.route import b200

            facts = b200(facts)
        arena_kind = default_kind(facts.device)
    except ValueError as error:
        raise CliError(str(error), Exit.USAGE) from error
    device = facts.device
    names = [checks.get(check).name] if check else list(checks.runs(asked, device))
    results = []
    with Worker(device) as worker:
        for name in names:
            job = ProveJob(
                route=route,
                check=name,
                column=asked.to_dict(),
                facts=facts.to_dict(),
                kv_lens=lens,
                seed=seed,
                device=device,
                arena_kind=arena_kind,
                pad_value=asked.pad_value,
            )
            results.append(prove(worker, job))
            if not json:
                print_text(_line(results[-1]))
    verdict = conclude(results, names)
    if json:
        print_json([row.to_dict() for row in results])
    else:
        print_text(f"{route} in {asked}: {verdict.status.value} ({_looked(verdict)})")
        for what, lines in (("requires", verdict.requires), ("limit", verdict.limits)):
            for line in lines:
                print_text(f"  {what}: {line}")
    return int(Exit.DONE if verdict.status is Status.SAFE else Exit.FAILED)


def _looked(at: CheckResult | Verdict) -> str:
    error = "" if at.worst_error is None else f", worst error {at.worst_error:.3g}"
    return f"{at.launches} launches{error}"


def _line(row: CheckResult) -> str:
    """A check in one line: what it found, or how much it looked at."""
    if row.status is CheckStatus.PASSED:
        said = _looked(row)
    else:
        said = f"{row.kind.value}: {row.detail}" if row.kind else row.detail
    return f"{row.status.value:15} {row.check:16} {said}"


def _lens(text: str, max_context: int) -> tuple[int, ...]:
    try:
        lens = tuple(int(part) for part in text.split(","))
    except ValueError:
        lens = ()
    if not lens or min(lens) < 1 or max(lens) > max_context:
        raise CliError(f"--kv-lens {text!r}: give lengths in 1..{max_context}, such as 64,300", Exit.USAGE)
    return lens
