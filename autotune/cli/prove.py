"""``autotune prove``: run checks of one route in one column again; what every stored repro command calls."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from typing import Annotated

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.options import Json


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
    from autotune.domain.verdict import Status, conclude
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
        arena_kind = default_kind(facts.device)
    except ValueError as error:
        raise CliError(str(error), Exit.USAGE) from error
    device = facts.device
    names = [checks.get(check).name] if check else list(checks.expected(asked, device))
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
                row = results[-1]
                kind = f" {row.kind.value}" if row.kind else ""
                print_text(f"{row.status.value:15}{kind} {name}: {row.detail}")
    verdict = conclude(results, names)
    if json:
        print_json([row.to_dict() for row in results])
    else:
        print_text(f"{route} in {asked}: {verdict.status.value}")
    return int(Exit.DONE if verdict.status is Status.SAFE else Exit.FAILED)


def _lens(text: str, max_context: int) -> tuple[int, ...]:
    try:
        lens = tuple(int(part) for part in text.split(","))
    except ValueError:
        lens = ()
    if not lens or min(lens) < 1 or max(lens) > max_context:
        raise CliError(f"--kv-lens {text!r}: give lengths in 1..{max_context}, such as 64,300", Exit.USAGE)
    return lens
