"""Runs the missing checks of a route in a column, in the child, one row at a time."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from autotune.domain.identity import stable_id
from autotune.domain.verdict import Status, Verdict
from autotune.tuner.book import ROW_CHECK
from autotune.worker.jobs import ProveJob, prove

if TYPE_CHECKING:
    from autotune.domain.cell import Cell, Column
    from autotune.routes.base import Route
    from autotune.tuner.book import ProofBook
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.listener import Listener
    from autotune.tuner.target import Target
    from autotune.worker.worker import Worker


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


class Prover:
    """Proofs of one target machine, written to one book."""

    def __init__(
        self, worker: Worker, target: Target, book: ProofBook, listener: Listener, deadline: Deadline
    ) -> None:
        self._worker = worker
        self._target = target
        self._book = book
        self._listener = listener
        self._deadline = deadline
        # a row that came out unproven is tried again by the next call, not by this one
        self._tried: set[tuple[str, str, str]] = set()
        self._told: set[tuple[str, str]] = set()

    def prove(self, route: Route, column: Column, kv_lens: tuple[int, ...]) -> Verdict:
        """The verdict after running what is missing, as far as the deadline allows.

        A route that failed is not shown further checks: it is unsafe whatever they say.
        """
        device = self._target.device
        verdict = self._book.verdict(route, column, device)
        for check in self._book.missing(route, column, device):
            if verdict.status is Status.UNSAFE or self._deadline.passed:
                break
            if (column.id, route.name, check) in self._tried:
                continue
            self._tried.add((column.id, route.name, check))
            self._run(route, column, column, check, kv_lens)
            verdict = self._book.verdict(route, column, device)
        self._tell(column, route, verdict)
        return verdict

    def prove_row(self, route: Route, cell: Cell) -> Verdict:
        """The verdict in a cell, after its own launch at the cell's longest length."""
        column, device = cell.column, self._target.device
        verdict = self._book.verdict(route, column, device)
        key = (cell.id, route.name, ROW_CHECK)
        if verdict.status is not Status.SAFE:
            return verdict
        if self._book.lacks_row(route, cell) and key not in self._tried and not self._deadline.passed:
            self._tried.add(key)
            self._run(route, column, cell, ROW_CHECK, (cell.kv_low, cell.kv_high))
            after = self._book.verdict(route, column, device)
            if after.status is not Status.SAFE:
                self._told.discard((column.id, route.name))
                self._tell(column, route, after)
        return self._book.verdict(route, column, device, cell)

    def _run(
        self, route: Route, column: Column, target: Column | Cell, check: str, kv_lens: tuple[int, ...]
    ) -> None:
        machine = self._target
        job = ProveJob(
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
        result = prove(self._worker, job)
        self._book.save(target, route, result, repro_command(job))
        self._listener.proof(column, route.name, result)

    def _tell(self, column: Column, route: Route, verdict: Verdict) -> None:
        final = verdict.status in (Status.SAFE, Status.UNSAFE)
        if final and (column.id, route.name) not in self._told:
            self._told.add((column.id, route.name))
            self._listener.verdict(column, route.name, verdict)
