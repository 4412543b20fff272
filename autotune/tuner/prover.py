"""Runs the missing checks of routes in columns, in the children, and stores each row as it comes."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from typing import TYPE_CHECKING

from autotune.domain.dtypes import BITS, Dtype
from autotune.domain.identity import stable_id
from autotune.domain.verdict import CheckStatus, Status
from autotune.hardware.memory import operand_bytes
from autotune.tuner.book import ROW_CHECK
from autotune.tuner.crew import Task
from autotune.worker.jobs import ProveJob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotune.domain.cell import Cell, Column
    from autotune.routes.base import Route
    from autotune.tuner.book import ProofBook
    from autotune.tuner.crew import Crew
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.listener import Listener
    from autotune.tuner.target import Target

    KvLens = Mapping[Column, tuple[int, ...]]


def seed_of(seed: int, *words: str) -> int:
    """A seed that depends on the study's and on what it is for, and on nothing else."""
    return int(stable_id([seed, *words], 8), 16) % (1 << 31)


def repro_command(job: ProveJob) -> str:
    """The command that runs this very check again, its operands to the byte."""
    column = json.dumps(job.column, separators=(",", ":"), sort_keys=True)
    lens = ",".join(str(length) for length in job.kv_lens)
    device = job.device.partition(":")[0]
    return (
        f"autotune prove {job.route} --column {shlex.quote(column)} --check {job.check} "
        f"--kv-lens {lens} --seed {job.seed} --pad-value {job.pad_value} --device {device}"
    )


def _mean_length(column: Column, kv_lens: tuple[int, ...]) -> int:
    """Mean row of a check's largest launch: rows are drawn over the whole range, uniform in the log."""
    longest = max(kv_lens)
    spread = longest / max(1.0, math.log(longest / column.q_len))
    return min(longest, round(spread + sum(kv_lens) / column.batch_size) + 1)


class Prover:
    """Proofs of one target machine, written to one book."""

    def __init__(
        self, crew: Crew, target: Target, book: ProofBook, listener: Listener, deadline: Deadline
    ) -> None:
        self._crew = crew
        self._target = target
        self._book = book
        self._listener = listener
        self._deadline = deadline
        # a row that came out unproven is tried again by the next call, not by this one
        self._tried: set[tuple[str, str, str]] = set()
        self._told: set[tuple[str, str]] = set()

    def prove(self, wanted: Sequence[tuple[Route, Column, Sequence[Cell]]], kv_lens: KvLens) -> None:
        """Run what is missing of each route in its column and in these cells of it, within the deadline.

        A route that failed is not shown further checks: it is unsafe whatever they say. A cell's own launch
        is made at its longest length, once its column is proven.

        Args:
            kv_lens: the lengths over which a column's checks spread theirs.
        """
        tasks = [self._task(route, column, cells, kv_lens[column]) for route, column, cells in wanted]
        rows = self._crew.run([task for task in tasks if task.jobs], lambda: self._deadline.passed)
        # closing it ends the children's work at once when a row cannot be stored
        with contextlib.closing(rows):
            for row in rows:
                self._tried.add((row.target.id, row.task.route.name, row.job.check))
                self._book.save(row.target, row.task.route, row.result, repro_command(row.job))
                self._listener.proof(row.task.column, row.task.route.name, row.result)
                if row.result.status is CheckStatus.FAILED:
                    self._told.discard((row.task.column.id, row.task.route.name))
                self._tell(row.task.column, row.task.route)

    def _task(self, route: Route, column: Column, cells: Sequence[Cell], kv_lens: tuple[int, ...]) -> Task:
        machine, name = self._target, route.name
        jobs: list[tuple[Column | Cell, ProveJob]] = []
        verdict = self._book.verdict(route, column, machine.device)
        if verdict.status is not Status.UNSAFE:
            jobs += [
                (column, self._job(route, column, column, check, kv_lens))
                for check in self._book.missing(route, column, machine.device)
                if (column.id, name, check) not in self._tried
            ]
            if jobs or verdict.status is Status.SAFE:
                jobs += [
                    (cell, self._job(route, column, cell, ROW_CHECK, (cell.kv_low, cell.kv_high)))
                    for cell in cells
                    if self._book.lacks_row(route, cell) and (cell.id, name, ROW_CHECK) not in self._tried
                ]
        # the pool, its pages that are withheld from `prepare`, the oracle's pieces; or the far pool of
        # scattered_pages, 2^31 elements of K and as many of V; and the engine's workspace
        far = 2 * 2**31 * BITS[Dtype(column.dtypes.kv)] // 8
        nbytes = max(far, 3 * operand_bytes(column, _mean_length(column, kv_lens)))
        nbytes += machine.engine.workspace_bytes
        return Task(route, column, tuple(jobs), nbytes)

    def _job(
        self, route: Route, column: Column, target: Column | Cell, check: str, kv_lens: tuple[int, ...]
    ) -> ProveJob:
        machine = self._target
        return ProveJob(
            route=route.name,
            check=check,
            column=column.to_dict(),
            facts=machine.facts.to_dict(),
            kv_lens=kv_lens,
            seed=seed_of(machine.seed, target.id, route.name, check),
            device=machine.device,
            arena_kind=machine.arena_kind,
            pad_value=machine.pad_value,
        )

    def _tell(self, column: Column, route: Route) -> None:
        if (column.id, route.name) in self._told:
            return
        verdict = self._book.verdict(route, column, self._target.device)
        if verdict.status in (Status.SAFE, Status.UNSAFE):
            self._told.add((column.id, route.name))
            self._listener.verdict(column, route.name, verdict)
