"""``autotune prove``: run checks of one route in one column again; what every stored repro command calls."""

from __future__ import annotations

import contextlib
import json as json_module
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.options import Json
from autotune.domain.route_name import EMULATED
from autotune.domain.verdict import CheckResult, CheckStatus, Status, Verdict, conclude

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from autotune.domain.cell import Column
    from autotune.worker.jobs import ProveJob

GUARDED, PLAIN = "guarded", "plain"


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
    arena: Annotated[
        str,
        typer.Option(
            "--arena",
            metavar="guarded|plain",
            help="Operands between unmapped addresses, or in ordinary memory: there a stray access may pass.",
        ),
    ] = GUARDED,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Not in a child, for compute-sanitizer and debuggers: a fault ends the command.",
        ),
    ] = False,
    sanitizer: Annotated[
        bool,
        typer.Option("--sanitizer", help="GPU: look at memory faults once more with compute-sanitizer."),
    ] = False,
    json: Json = False,
) -> int:
    """Run one route's checks in one column, here and now; nothing is stored.

    What every stored repro command calls. Exit 1 unless all of them pass; a route that does not support the
    column is not run, its reason is told.
    """
    from autotune.arena.factory import default_kind
    from autotune.checks import registry as checks
    from autotune.cli.output import print_json, print_text
    from autotune.domain.cell import Column
    from autotune.hardware.collect import collect
    from autotune.worker.jobs import ProveJob, child_route

    if arena not in (GUARDED, PLAIN):
        raise CliError(f"--arena {arena}: {GUARDED} or {PLAIN}", Exit.USAGE)
    try:
        asked = Column.from_dict(json_module.loads(column))
        if pad_value is not None:
            asked = replace(asked, pad_value=pad_value)
    except RecursionError as error:
        raise CliError("--column is not a stored column: it is nested too deeply", Exit.USAGE) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(
            f"--column is not a stored column: {type(error).__name__}: {error}", Exit.USAGE
        ) from error
    lens = _lens(kv_lens, asked.max_context)
    try:
        asked_of = child_route(route)
        facts = collect(device, threads=1)
        if route.startswith(EMULATED):
            from autotune.routes.flashinfer.emulation.route import b200

            facts = b200(facts)
        arena_kind = PLAIN if arena == PLAIN else default_kind(facts.device)
    except ValueError as error:
        raise CliError(str(error), Exit.USAGE) from error
    device = facts.device
    try:
        reason = asked_of.supports(asked, facts)
    except Exception as error:  # a third party's, as in a run's line-up
        reason = f"it raised {type(error).__name__}: {error}"
    if reason is not None:
        raise CliError(f"{route} in {asked}: unsupported: {reason}")
    _fits(asked, device)
    tool = _tool(device) if sanitizer else None
    names = [checks.get(check).name] if check else list(checks.runs(asked, device))
    results = []
    with _proving(device, arena_kind, in_process) as prove:
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
            results.append(_examined(prove(job), job, tool))
            if not json:
                print_text(_line(results[-1]))
    verdict = conclude(results, names)
    if json:
        print_json([row.to_dict() for row in results])
    else:
        unguarded = "; operands not guarded, so no proof" if arena == PLAIN else ""
        print_text(f"{route} in {asked}: {verdict.status.value} ({_looked(verdict)}{unguarded})")
        for what, lines in (("requires", verdict.requires), ("limit", verdict.limits)):
            for line in lines:
                print_text(f"  {what}: {line}")
    return int(Exit.DONE if verdict.status is Status.SAFE else Exit.FAILED)


@contextlib.contextmanager
def _proving(device: str, arena_kind: str, in_process: bool) -> Iterator[Callable[[ProveJob], CheckResult]]:
    """What runs a job: a worker's child, or this process."""
    if in_process:
        from autotune.cli.in_process import limit_time, prove_here

        limit_time()
        yield prove_here
        return
    from autotune.worker.jobs import prove
    from autotune.worker.worker import Worker

    with Worker(device, guard_allocations=arena_kind != PLAIN) as worker:
        yield partial(prove, worker)


def _fits(column: Column, device: str) -> None:
    """Refuse a column that no memory here holds, before anything is allocated for it.

    Counts what every call of it has: query, output, page table, lengths, one page of K and V.
    """
    shape = column.shape
    heads = shape.num_qo_heads * (shape.head_dim + shape.head_dim_vo)
    page = shape.page_size * shape.num_kv_heads * (shape.head_dim + shape.head_dim_vo)
    # the narrowest elements: a lower bound in bytes
    need = column.rows * heads + 4 * column.batch_size * (column.table_width + 1) + page // 2
    if device == "cuda":
        import torch

        have = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        raise CliError(
            f"--column: one call's operands do not fit in this machine's {have / 2**30:.3g} GiB of memory; "
            "give a smaller batch_size, q_len, max_context or shape",
            Exit.USAGE,
        )


def _tool(device: str) -> Path:
    """compute-sanitizer, which ``--sanitizer`` asks for."""
    from autotune.sanitizer.tool import NAME, find

    if device != "cuda":
        raise CliError("--sanitizer needs a GPU; on the CPU a fault's own line says where it was", Exit.USAGE)
    if (found := find()) is None:
        raise CliError(
            f"--sanitizer: {NAME} is neither on PATH nor in CUDA_HOME, CUDA_PATH or /usr/local/cuda"
        )
    return found


def _examined(row: CheckResult, job: ProveJob, tool: Path | None) -> CheckResult:
    """``row`` with what compute-sanitizer says of a memory fault behind its detail."""
    from autotune.sanitizer.examine import MEMORY, examine
    from autotune.tuner.prover import repro_command

    if tool is None or row.kind not in MEMORY:
        return row
    note = examine(tool, repro_command(job)).note
    return replace(row, detail=f"{row.detail}; {note}" if row.detail else note)


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
