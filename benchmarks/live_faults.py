"""Mistakes that engines have made with real kernels: what guarded memory, the checks and the contract say.

    python benchmarks/live_faults.py [--sanitizer] [--only FAULT,...] [--routes a,b] [--seconds 600]
                                     [--json FILE] [--device cpu]

Each mistake (``autotune/routes/planted_live.py``) is made in a real route, in a child and in guarded memory,
and looked at by the check that is meant for it. A row says what was expected, what was seen, and which rule
of the call's contract refuses it before a launch, at which level: ``static`` reads no tensor, ``full`` may.
Where the outcome was measured on an H200 before (FlashInfer 0.6.18, driver 580), that is what is expected;
elsewhere, that it is not taken for safe. ``--sanitizer`` looks at memory faults again with compute-sanitizer,
while there is time; what it finds is a line of its own, below the fault's. ``--json`` is written anew with
each row, so that a run which is killed keeps them.

A batch of 65,536 is never launched: the contract refuses it. Extreme logits are no mistake: a route that gets
them wrong states a limit. On the CPU the torch routes stand in. Exit 0 if every row that ran is as expected,
1 if one is not or no child can be had, 2 for a wrong flag, 3 if nothing can be run here.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autotune.arena.factory import default_kind
from autotune.arena.operands import QueryStride, Recipe, build, capacity_of
from autotune.arena.plain import PlainArena
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.domain.verdict import CheckStatus
from autotune.hardware.collect import collect
from autotune.hardware.errors import HardwareError
from autotune.routes.base import Capacity, Need, Step
from autotune.routes.contract import ContractError, Level, check_step
from autotune.routes.contract.context import Buffers, Context
from autotune.routes.contract.kernel import GRID_LIMIT, SCRATCH_BYTES, kernel_of
from autotune.routes.flashinfer.masks import fill_causal_mask
from autotune.routes.planted_live import MISTAKES, dirty, name_of
from autotune.routes.planted_xqa import COLUMN
from autotune.sanitizer.examine import MEMORY, examine
from autotune.sanitizer.tool import find
from autotune.tuner.crew import Crew, Task
from autotune.tuner.deadline import Deadline
from autotune.tuner.prover import repro_command
from autotune.worker.base import WorkerError
from autotune.worker.jobs import ProveJob, child_route
from autotune.worker.worker import Worker
from benchmarks.ending import ending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.domain.fingerprint import Facts
    from autotune.domain.verdict import CheckResult
    from autotune.routes.base import Route

SEED = 20261129
KV_LENS = (64, 300)
STEP_TIMEOUT_S = 30.0
# compute-sanitizer takes 7 to 8 s where nothing else runs, and longer beside others.
LOOK_S, LEAST_LOOK_S = 60.0, 15.0
# A child that dies is replaced, which takes seconds: others go on meanwhile.
PROVERS = {"cpu": 1, "cuda": 4}
CPU_COLUMN = Column(Shape(4, 2, 64, 16), PROFILES["bf16"], q_len=4, batch_size=4, max_context=512)
MOST_DETAIL = 150
# Outcomes: a verdict's word, with a failure's kind behind it where there is one.
CAUGHT = ("unsafe", "refused")
ANY = (*CAUGHT, "limit", "safe")
SAFE_OR_LIMIT = ("limit", "safe")
NOT_RUN, NOT_HERE = "not run", "not here"


@dataclass(frozen=True)
class Case:
    """One mistake in one route.

    Attributes:
        fault: a mistake of ``planted_live``, or what this file calls it where the route is called as it is.
        expected: outcomes that are as expected, ``unsafe`` standing for every kind of it.
        measured: whether the expectation is a measured one.
        pad_value: of the column; 0 pads with rows of no tokens.
    """

    fault: str
    route: str
    check: str
    expected: tuple[str, ...] = CAUGHT
    measured: bool = False
    pad_value: int = 1

    @property
    def name(self) -> str:
        """The route as a job looks it up."""
        return name_of(self.fault, self.route) if self.fault in MISTAKES else self.route

    @property
    def made(self) -> str:
        """How the mistake is made."""
        return MISTAKES[self.fault].made if self.fault in MISTAKES else AS_IT_IS[self.fault]


GRID = "batch-above-65535"
AS_IT_IS = {
    "pad-with-0": "Rows padded to the captured size have seq_lens 0; live rows beside them, then none.",
    "pad-with-0-replayed": "The same, in a CUDA graph that is replayed.",
    "extreme-logits": "All logits of a row far from zero: 1e2 to 2e5 in magnitude.",
    GRID: f"{GRID_LIMIT + 1} requests of one token: CUDA's grid ends at {GRID_LIMIT} in y and z.",
}
ILLEGAL, WRONG, NAN = ("unsafe illegal_access",), ("unsafe wrong_output",), ("unsafe nan_leak",)
FA = ("fa2", "fa3")


def _cuda_cases() -> tuple[Case, ...]:
    """What leaves the child alive first: a death in a fresh child needs no second run to be told apart."""
    xqa, fmha = "xqa-decode", "fmha-v2"
    return (
        Case("extreme-logits", xqa, "extreme_logits", ("limit",), True),
        # fa2 took -5e4 for minus infinity up to 0.6.18, and takes IEEE's in 0.7.2 (math.cuh)
        *(Case("extreme-logits", route, "extreme_logits", SAFE_OR_LIMIT) for route in (fmha, *FA)),
        Case("old-lengths", xqa, "reference", WRONG, True),
        *(Case("old-lengths", route, "reference") for route in (fmha, *FA)),
        Case("strided-query", xqa, "strides", WRONG, True),
        Case("strided-query", fmha, "strides"),
        Case("dirty-semaphores", xqa, "reference", ("unsafe",), True),
        Case("empty-row", xqa, "reference", ("unsafe",), True),
        *(Case("empty-row", route, "reference") for route in (fmha, *FA)),
        Case("pad-with-0", xqa, "padded_rows", ANY, pad_value=0),
        *(Case("pad-with-0", route, "padded_rows", ANY, pad_value=0) for route in (fmha, *FA, "fa2-decode")),
        Case("pad-with-0-replayed", xqa, "graph_replay", NAN, True, pad_value=0),
        *(Case("pad-with-0-replayed", route, "graph_replay", ANY, pad_value=0) for route in (fmha, *FA)),
        Case("page-minus-1", xqa, "reference", WRONG, True),
        Case("page-minus-100000", xqa, "reference", WRONG, True),
        *(Case("small-output", route, "reference", ("unsafe launch_error",), route == "fa2") for route in FA),
        *(Case("narrow-table", route, "ragged_lengths", ("refused",)) for route in FA),
        Case("narrow-table", xqa, "ragged_lengths", ILLEGAL, True),
        Case("narrow-table", fmha, "ragged_lengths"),
        Case("small-output", xqa, "reference", ILLEGAL, True),
        Case("small-output", fmha, "reference"),
        Case("page-past-the-pool", xqa, "reference", ILLEGAL, True),
        *(Case("page-past-the-pool", route, "reference") for route in (fmha, *FA)),
        Case("page-farthest", xqa, "reference", ILLEGAL, True),
        *(Case("page-farthest", route, "reference") for route in (fmha, "fa2")),
        *(Case("page-minus-1", route, "reference") for route in (fmha, "fa2")),
        *(Case("page-minus-100000", route, "reference") for route in (fmha, "fa2")),
        Case(GRID, xqa, "", ("refused",), True),
    )


def _cpu_cases() -> tuple[Case, ...]:
    cases = []
    for route in ("torch-splitkv", "torch-sdpa"):
        cases += [
            Case("extreme-logits", route, "extreme_logits", SAFE_OR_LIMIT),
            Case("old-lengths", route, "reference", WRONG),
            Case("empty-row", route, "reference", WRONG),
            Case("pad-with-0", route, "padded_rows", ("safe",), pad_value=0),
            Case("narrow-table", route, "ragged_lengths"),
            Case("small-output", route, "reference"),
            *(Case(fault, route, "reference") for fault in MISTAKES if fault.startswith("page-")),
        ]
    # what a kernel's own rules say needs no kernel
    cases += [Case(fault, "xqa-decode", "", ("refused",)) for fault in ("strided-query", "dirty-semaphores")]
    return (*cases, Case(GRID, "xqa-decode", "", ("refused",)))


CASES = {"cpu": _cpu_cases(), "cuda": _cuda_cases()}
COLUMNS = {"cpu": CPU_COLUMN, "cuda": COLUMN}


@dataclass
class Seen:
    """What came of a case.

    Attributes:
        outcome: see ``CAUGHT``.
        contract: ``RULE (LEVEL)`` of the rule that refuses the call; "" if none does.
    """

    case: Case
    outcome: str
    detail: str = ""
    contract: str = ""
    sanitizer: str = ""
    repro: str = ""

    @property
    def ran(self) -> bool:
        """Whether there is anything to hold against the expectation."""
        return self.outcome not in (NOT_RUN, NOT_HERE)

    @property
    def good(self) -> bool:
        """As expected."""
        return any(self.outcome == word or self.outcome.startswith(f"{word} ") for word in self.case.expected)

    def line(self) -> str:
        """One row of the table."""
        case = self.case
        expected = ", ".join(case.expected) + (" (measured)" if case.measured else "")
        word = "" if not self.ran else "yes" if self.good else "NO"
        detail = self.detail if len(self.detail) <= MOST_DETAIL else self.detail[: MOST_DETAIL - 3] + "..."
        return (
            f"| {case.fault} | {case.route} | {case.made} | {expected} | {self.outcome} | {word} "
            f"| {self.contract} | {detail.replace('|', '/')} |"
        )

    def to_dict(self) -> dict[str, object]:
        """JSON-ready values."""
        return {**vars(self), "case": vars(self.case), "made": self.case.made, "good": self.good}


def outcome_of(row: CheckResult) -> str:
    """A row in the words of ``CAUGHT``."""
    if row.status is CheckStatus.FAILED and row.kind is not None:
        return f"unsafe {row.kind.value}"
    if row.status is CheckStatus.PASSED:
        return "limit" if row.limits else "safe"
    if row.status is CheckStatus.REFUSED:
        return "refused"
    if row.status is CheckStatus.UNPROVEN and row.reason is not None:
        return f"unproven {row.reason.value}"
    return str(row.status.value)


def job_of(case: Case, column: Column, facts: Facts) -> ProveJob:
    """What a child runs."""
    return ProveJob(
        route=case.name,
        check=case.check,
        column=replace(column, pad_value=case.pad_value).to_dict(),
        facts=facts.to_dict(),
        kv_lens=KV_LENS,
        seed=SEED,
        device=facts.device,
        arena_kind=default_kind(facts.device),
        pad_value=case.pad_value,
    )


def refusal(case: Case, column: Column) -> tuple[str, str]:
    """``RULE (LEVEL)`` of the contract's answer to the call, and its message; ("", "") if it lets it through.

    No kernel is needed: the operands are made on the CPU, and changed as the mistake changes them. Rows that
    a column pads with 0 are a proven pad value, which the contract allows.
    """
    if case.fault == GRID:
        return _grid_refusal(case, column)
    if case.fault not in MISTAKES:
        return "", ""
    needs = child_route(case.route).needs
    page = column.shape.page_size
    # the longest request's new tokens begin a page
    lens = (*(page + row for row in range(column.batch_size - 1)), 4 * page + 1)
    packed = QueryStride.PACKED_QKV if case.fault == "strided-query" else QueryStride.CANONICAL
    recipe = Recipe(lens, seed=SEED, query_stride=packed)
    with PlainArena() as arena:
        operands = build(arena, column, recipe, "cpu")
        if Need.HOST_KV_LENS not in needs:
            operands.step.host_kv_lens = None
        capacity = capacity_of(column, recipe, "cpu")
        mistake = MISTAKES[case.fault]
        step = mistake.step(operands.step, capacity, arena.tensor)
        out = mistake.out(operands.out, arena.tensor)
        cached = tuple(kv_len - column.q_len for kv_len in lens)
        context = Context(buffers=_buffers(case, column))
        for level in (Level.STATIC, Level.FULL):
            try:
                check_step(
                    capacity,
                    step,
                    level=level,
                    out=out,
                    pad_value=column.pad_value,
                    route=case.route,
                    context=context,
                    cached_lens=cached,
                )
            except ContractError as error:
                return f"{error.rule} ({level.value})", str(error)
    return "", ""


@cache
def _workspace(is_dirty: bool) -> torch.Tensor:
    workspace = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8)
    if is_dirty:
        dirty(workspace)
    return workspace


def _buffers(case: Case, column: Column) -> Buffers:
    """An engine's workspace and mask, right but for the mistake."""
    workspace = _workspace(case.fault == "dirty-semaphores")
    mask = None
    if kernel_of(case.route).draft_mask and column.q_len > 1:
        mask = torch.zeros((column.batch_size, column.q_len, 2 * -(-column.q_len // 32)), dtype=torch.uint16)
        fill_causal_mask(mask)
    return Buffers(workspace=workspace, mask=mask)


def _grid_refusal(case: Case, column: Column) -> tuple[str, str]:
    """Tensors of shape and stride only: half a GiB of queries need not be there to be refused."""
    batch = GRID_LIMIT + 1
    column = replace(column, q_len=1, batch_size=batch)
    shape, pages = column.shape, 8
    with torch.device("meta"):
        pool = torch.empty(
            (2, pages, shape.page_size, shape.num_kv_heads, shape.head_dim), dtype=torch.bfloat16
        )
        step = Step(
            q=torch.empty((batch, shape.num_qo_heads, shape.head_dim), dtype=torch.bfloat16),
            k=pool[0],
            v=pool[1],
            page_table=torch.empty((batch, column.table_width), dtype=torch.int32),
            seq_lens=torch.empty((batch,), dtype=torch.int32),
            host_kv_lens=None,
            q_len=1,
            sm_scale=shape.head_dim**-0.5,
            k_scale=1.0,
            v_scale=1.0,
            max_seq_len=column.max_context,
        )
        out = torch.empty_like(step.q)
    capacity = Capacity(column, batch, pages, "meta")
    try:
        check_step(capacity, step, level=Level.STATIC, out=out, route=case.route)
    except ContractError as error:
        return f"{error.rule} ({Level.STATIC.value})", str(error)
    return "", ""


def absent(route: Route, column: Column, facts: Facts) -> str | None:
    """Why ``route`` cannot run here; None if it can."""
    available = getattr(route, "available", None)
    return route.supports(column, facts) or (available(column, facts) if callable(available) else None)


def unlaunched(case: Case, column: Column, facts: Facts) -> Seen | None:
    """What is known without a launch: the contract's cases, and what is not here; None for what is to run."""
    contract, message = refusal(case, column)
    if not case.check:
        return Seen(case, "refused" if contract else "not refused", message, contract)
    if reason := absent(child_route(case.name), replace(column, pad_value=case.pad_value), facts):
        return Seen(case, NOT_HERE, reason, contract)
    return None


def seen_of(case: Case, row: CheckResult, job: ProveJob, column: Column) -> Seen:
    """What came of a launch."""
    return Seen(
        case,
        outcome_of(row),
        "; ".join(row.limits) or row.detail,
        refusal(case, column)[0],
        repro=repro_command(job),
    )


def look(seen: Seen, tool: Path, left_s: float) -> None:
    """Look at a memory fault once more with ``tool``, and say what it says."""
    if left_s < LEAST_LOOK_S:
        seen.sanitizer = "sanitizer: no time left"
    else:
        seen.sanitizer = examine(tool, seen.repro, timeout_s=min(LOOK_S, left_s)).note
    print(f"| | | {seen.case.fault} in {seen.case.route} | | | | | {seen.sanitizer.replace('|', '/')} |")
    sys.stdout.flush()


def chosen(device: str, only: str | None, names: str | None) -> list[Case]:
    """The device's cases, those of ``only`` faults and ``names`` of routes.

    Raises:
        ValueError: a name is not known.
    """
    cases = list(CASES[device])
    for asked, of in ((only, "fault"), (names, "route")):
        if asked is None:
            continue
        wanted = [name.strip() for name in asked.split(",")]
        known = list(dict.fromkeys(getattr(case, of) for case in cases))
        if unknown := [name for name in wanted if name not in known]:
            raise ValueError(f"no {of} is called {unknown[0]!r}; there are {', '.join(known)}")
        cases = [case for case in cases if getattr(case, of) in wanted]
    return cases


class Rows:
    """The rows in the order in which they are known: printed and written at once."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.seen: list[Seen] = []
        print("| fault | route | how it was made | expected | seen | as expected | contract | detail |")
        print("|---|---|---|---|---|---|---|---|", flush=True)

    def add(self, seen: Seen) -> None:
        """One more."""
        self.seen.append(seen)
        print(seen.line(), flush=True)
        self.write()

    def write(self) -> None:
        """All of them, as they are now."""
        if self._path is not None:
            self._path.write_text(json.dumps([seen.to_dict() for seen in self.seen], indent=1) + "\n")


def run(
    cases: Sequence[Case], facts: Facts, rows: Rows, *, seconds: float, provers: int, tool: Path | None
) -> None:
    """Every case, told as it is known; those that do not begin within ``seconds`` are ``not run``.

    Raises:
        WorkerError: no child can be had.
    """
    column, deadline = COLUMNS[facts.device], Deadline(seconds)
    waiting: dict[int, tuple[Case, Task]] = {}
    for case in cases:
        if early := unlaunched(case, column, facts):
            rows.add(early)
            continue
        job = job_of(case, column, facts)
        asked = Column.from_dict(job.column)
        task = Task(child_route(case.name), asked, ((asked, job),))
        waiting[id(task)] = (case, task)
    try:
        with contextlib.ExitStack() as stack:
            workers = [
                stack.enter_context(Worker(facts.device, step_timeout_s=STEP_TIMEOUT_S))
                for _ in range(provers)
            ]
            tasks = [task for _, task in waiting.values()]
            found = Crew(workers).run(tasks, lambda: deadline.passed)
            with contextlib.closing(found):
                for row in found:
                    case, _ = waiting.pop(id(row.task))
                    rows.add(seen := seen_of(case, row.result, row.job, column))
                    # meanwhile the children go on
                    if tool is not None and row.result.kind in MEMORY:
                        look(seen, tool, deadline.left)
                        rows.write()
    finally:
        for case, _ in waiting.values():
            rows.add(Seen(case, NOT_RUN))


def main(given: Sequence[str] | None = None) -> int:
    """Make the mistakes and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one")
    parser.add_argument("--only", metavar="FAULT,...", help="only these")
    parser.add_argument("--routes", metavar="NAME,...", help="only these")
    parser.add_argument("--seconds", type=float, default=600.0, help="no case begins after them")
    parser.add_argument("--provers", type=int, help="children at once (cpu: 1, GPU: 4)")
    parser.add_argument(
        "--sanitizer", action="store_true", help="GPU: memory faults under compute-sanitizer too"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the rows, for a program")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    try:
        facts = collect(options.device, threads=1)
        cases = chosen(facts.device, options.only, options.routes)
        if options.sanitizer and facts.device != "cuda":
            raise ValueError("--sanitizer: needs a GPU, and compute-sanitizer on PATH or in CUDA_HOME")
        tool = find() if options.sanitizer else None
    except ValueError as error:
        print(f"live_faults: {error}", file=sys.stderr)
        return 2
    except HardwareError as error:
        print(f"live_faults: {error}", file=sys.stderr)
        return 3
    if options.sanitizer and tool is None:
        # the faults are worth their time without it
        print("live_faults: compute-sanitizer is not on PATH or in CUDA_HOME: left out", file=sys.stderr)
    start, lost = time.monotonic(), False
    provers = options.provers or PROVERS[facts.device]
    rows = Rows(options.json)
    try:
        with ending("live_faults", max(0.0, options.seconds)):
            run(cases, facts, rows, seconds=options.seconds, provers=provers, tool=tool)
    except WorkerError as error:
        lost = True
        print(f"live_faults: {error}", file=sys.stderr)
    found = rows.seen
    counts = Counter(seen.outcome for seen in found)
    ran = [seen for seen in found if seen.ran]
    bad = [seen for seen in ran if not seen.good]
    for seen in bad:
        print(f"not as expected: {seen.case.fault} in {seen.case.route}: {seen.outcome}: {seen.detail}")
        if seen.repro:
            print(f"  {seen.repro}")
    print(
        f"\n{len(ran)} of {len(found)} cases ran in {time.monotonic() - start:.0f} s, "
        f"{len(bad)} not as expected: "
        + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    )
    if not ran and not lost:
        return 3
    return 1 if bad or lost else 0


if __name__ == "__main__":
    sys.exit(main())
