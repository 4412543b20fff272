"""The sweep, its proofs and its races, with a worker that follows a script."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.bench.record import Round
from autotune.checks import registry
from autotune.domain.decision import Reason
from autotune.domain.verdict import CheckStatus, FailureKind, Status, UnprovenReason
from autotune.tuner.book import ROW_CHECK, TIMING, ProofBook
from autotune.tuner.prover import seed_of
from autotune.tuner.publish import accusations, decide_all
from autotune.tuner.run import OpenedRun
from autotune.worker.base import Broken, Failed, JobError, Outcome
from tests.tuner.scripted import ScriptedWorker, failed, opened, routes, sweep, target, unproven

FAST = routes("fast")
CHECKS = registry.runs(target().grid.columns[0], "cpu")


def reasons(run: OpenedRun) -> set[Reason]:
    return {cell.decision.reason for cell in decide_all(run)}


def test_a_sweep(tmp_path: Path) -> None:
    worker = ScriptedWorker(times={"fast": 5.0})
    with opened(tmp_path, FAST) as run:
        progress = sweep(run, worker)
        assert (progress.cells, progress.settled, progress.now, progress.out_of_budget) == (4, 4, 4, False)
        assert reasons(run) == {Reason.PROVEN_FASTER}
        # the fallback first, every check once a column and route, then a row's own launch
        first = [(route, check) for route in ("torch-sdpa", "fast") for check in (*CHECKS, ROW_CHECK)]
        assert worker.proved[: len(first)] == first
        assert len(worker.proved) == 2 * 2 * len(CHECKS) + 4 * 2
        timing = {row.route: row for row in run.repository.timings(run.study, run.cells[0].cell)}
        assert timing["fast"].above == timing["fast"].rounds > 0
        assert timing["fast"].summary["graph"]["state"] == "claim"
        assert (timing["torch-sdpa"].above, timing["torch-sdpa"].summary) == (0, {})
        again = ScriptedWorker()
        assert sweep(run, again).now == 0
        assert again.proved == again.timed == []


def test_at_most_so_many_trials(tmp_path: Path) -> None:
    with opened(tmp_path, FAST) as run:
        first = sweep(run, ScriptedWorker(), trials=1)
        assert (first.settled, first.now) == (1, 1)
        second = sweep(run, ScriptedWorker(), trials=2)
        assert (second.settled, second.now) == (3, 2)
        # cheapest first
        assert [item.position for item in run.cells] == [0, 1, 2, 3]


def test_a_failed_check_ends_a_proof_and_keeps_the_route_out_of_the_race(tmp_path: Path) -> None:
    worker = ScriptedWorker({("fast", CHECKS[1]): failed()})
    with opened(tmp_path, FAST) as run:
        sweep(run, worker)
        assert [check for route, check in worker.proved if route == "fast"] == [
            *CHECKS[:2]
        ] * 2  # two columns
        assert worker.timed == []
        assert reasons(run) == {Reason.CANDIDATE_UNSAFE}
        found = accusations(run)
        assert [(item.route, item.kind) for item in found] == [("fast", "wrong_output")] * 2
        assert all(item.repro.startswith("autotune prove fast --column ") for item in found)
        assert all("--device cpu" in item.repro for item in found)


def test_a_fallback_that_fails_is_no_safe_route(tmp_path: Path) -> None:
    worker = ScriptedWorker({("torch-sdpa", CHECKS[0]): failed()})
    with opened(tmp_path, FAST) as run:
        assert sweep(run, worker).settled == 4
        assert reasons(run) == {Reason.NO_SAFE_ROUTE}
        assert {route for route, _ in worker.proved} == {"torch-sdpa"}


def test_what_is_unproven_is_tried_again_by_the_next_call_only(tmp_path: Path) -> None:
    broken = ScriptedWorker({("fast", CHECKS[2]): unproven})
    with opened(tmp_path, FAST) as run:
        progress = sweep(run, broken)
        assert (progress.settled, progress.now) == (0, 0)
        # once in each of two columns, though each has two cells
        assert broken.proved.count(("fast", CHECKS[2])) == 2
        # the checks after it are run nevertheless
        assert broken.proved.count(("fast", CHECKS[3])) == 2
        assert reasons(run) == {Reason.UNPROVEN}
        assert accusations(run) == ()
        mended = ScriptedWorker()
        assert sweep(run, mended).settled == 4
        assert [each for each in mended.proved if each[1] != ROW_CHECK] == [("fast", CHECKS[2])] * 2
        assert reasons(run) == {Reason.NOT_FASTER}


def test_a_death_while_timing_is_the_running_routes(tmp_path: Path) -> None:
    worker = ScriptedWorker(times={"fast": 5.0, "other": 5.0}, deaths={"fast"})
    known = routes("fast", "other")
    with opened(tmp_path, known) as run:
        sweep(run, worker, trials=1)
        first = run.cells[0].cell
        column = first.column
        assert run.book.verdict(known["fast"], column, "cpu").status is Status.UNSAFE
        assert run.book.verdict(known["other"], column, "cpu").status is Status.SAFE
        assert run.book.verdict(known["torch-sdpa"], column, "cpu").status is Status.SAFE
        # the others raced on, and the rounds from before the death still count
        assert worker.timed == [("torch-sdpa", "fast", "other"), ("torch-sdpa", "other")]
        rounds = run.repository.rounds(run.study, first)
        assert [each["index"] for each in rounds] == list(range(len(rounds)))
        (proof,) = [
            proof for proof in run.repository.all_proofs(run.fingerprint) if proof.result.check == TIMING
        ]
        assert (proof.cell_id, proof.route, proof.result.kind) == (
            first.id,
            "fast",
            FailureKind.ILLEGAL_ACCESS,
        )
        # unsafe in the whole column, and again from the database
        book = ProofBook(run.repository, run.fingerprint)
        for item in run.cells:
            status = book.verdict(known["fast"], item.cell.column, "cpu", item.cell).status
            assert (status is Status.UNSAFE) == (item.cell.column == column)


def test_a_death_in_one_cell_amends_the_decisions_of_its_column(tmp_path: Path) -> None:
    with opened(tmp_path, FAST) as run:
        sweep(run, ScriptedWorker(times={"fast": 5.0}), trials=1)
        first = run.cells[0].cell
        assert run.repository.decisions(run.study)[first.id].route == "fast"
        sweep(run, ScriptedWorker(times={"fast": 5.0}, deaths={"fast"}))
        after = run.repository.decisions(run.study)
        assert {decision.reason for decision in after.values()} == {Reason.CANDIDATE_UNSAFE}
        assert reasons(run) == {Reason.CANDIDATE_UNSAFE}


def test_a_death_of_our_own_code_accuses_nobody(tmp_path: Path) -> None:
    worker = ScriptedWorker(times={"fast": 5.0}, deaths={"fast"}, step="")
    with opened(tmp_path, FAST) as run:
        assert sweep(run, worker).settled == 0
        assert accusations(run) == ()
        assert len(run.repository.rounds(run.study, run.cells[0].cell)) == 4
        assert sweep(run, ScriptedWorker(times={"fast": 5.0})).settled == 4


def details(run: OpenedRun) -> set[str]:
    return {cell.decision.detail for cell in decide_all(run)}


def test_why_a_proof_is_missing_is_said(tmp_path: Path) -> None:
    worker = ScriptedWorker({("fast", CHECKS[0]): unproven})
    with opened(tmp_path, FAST) as run:
        sweep(run, worker)
        assert details(run) == {f"fast: out_of_memory in {CHECKS[0]}: no memory"}
    worker = ScriptedWorker({("torch-sdpa", CHECKS[0]): unproven})
    with opened(tmp_path / "fallback", FAST) as run:
        sweep(run, worker)
        assert details(run) == {f"fallback torch-sdpa: out_of_memory in {CHECKS[0]}: no memory"}


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (Broken(UnprovenReason.OUT_OF_MEMORY, "no memory", "fast: timing c"), "no memory (fast: timing c)"),
        (JobError("ImportError", "no module\nnamed x"), "ImportError: no module named x"),
        (Failed(FailureKind.CRASH, "SIGABRT", ""), "SIGABRT"),
    ],
)
def test_why_timing_ended_is_said_until_it_goes_on(end: Outcome, said: str, tmp_path: Path) -> None:
    class Ending(ScriptedWorker):
        def _end(self) -> Outcome | None:
            return end

    with opened(tmp_path, FAST) as run:
        assert sweep(run, Ending(times={"fast": 5.0})).settled == 0
        assert details(run) == {f"fast: timing stopped after 4: {said}"}
        assert accusations(run) == ()
        # in the database, and no verdict suffers from it
        book = ProofBook(run.repository, run.fingerprint)
        cell = run.cells[0].cell
        assert book.trouble(FAST.values(), cell) == said
        assert book.verdict(FAST["fast"], cell.column, "cpu", cell).status is Status.SAFE
        assert sweep(run, ScriptedWorker(times={"fast": 5.0})).settled == 4
        assert reasons(run) == {Reason.PROVEN_FASTER}


def test_a_cell_that_keeps_losing_its_child_is_given_up(tmp_path: Path) -> None:
    class Ending(ScriptedWorker):
        def _end(self) -> Outcome | None:
            return Broken(UnprovenReason.OUT_OF_MEMORY, "no memory", "fast: timing c")

    with opened(tmp_path, FAST) as run:
        sweep(run, Ending(times={"fast": 5.0}))
        assert {trial.lost for trial in run.repository.trials(run.study).values()} == {1}
        for item in run.cells:  # two more such calls
            run.repository.lose_chunk(run.study, item.cell)
            run.repository.lose_chunk(run.study, item.cell)
        # rounds lost only where a route was slow would bias the test: it is not retried for ever
        assert sweep(run, ScriptedWorker(times={"fast": 5.0})).settled == 0
        assert reasons(run) == {Reason.UNPROVEN}


def test_a_route_that_comes_back_after_dropped_rounds_gets_another_child(tmp_path: Path) -> None:
    """A child does not open a route again that it has left out."""

    class Throttled(ScriptedWorker):
        def _round(self, index: int, live: tuple[str, ...]) -> Round:
            found = super()._round(index, live)
            return replace(found, dropped="thermal") if 8 <= index < 12 else found

    with opened(tmp_path, routes("fast", "slow")) as run:
        worker = Throttled(times={"fast": 9.0, "slow": 20.0})
        assert sweep(run, worker).settled == 4
        assert reasons(run) == {Reason.PROVEN_FASTER}
        assert {trial.lost for trial in run.repository.trials(run.study).values()} == {0}
        assert not [p for p in run.repository.all_proofs(run.fingerprint) if p.result.check == TIMING]
        assert len(worker.timed) == 8


def test_rounds_are_committed_before_they_are_judged(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    with opened(tmp_path, FAST) as run:
        chunks = []

        def die() -> None:
            chunks.append(len(run.repository.rounds(run.study, run.cells[0].cell)))
            if len(chunks) == 3:
                raise Killed

        with pytest.raises(Killed):
            sweep(run, ScriptedWorker(times={"fast": 5.0}, on_chunk=die))
        assert chunks == [0, 4, 8]
        worker = ScriptedWorker(times={"fast": 5.0})
        sweep(run, worker, trials=1)
        rounds = run.repository.rounds(run.study, run.cells[0].cell)
        assert [each["index"] for each in rounds] == list(range(len(rounds)))
        assert worker.proved == []
        trial = run.repository.trials(run.study)[run.cells[0].cell.id]
        assert (trial.kills, trial.retries) == (0, 1)


def test_a_deadline_ends_it_between_two_checks(tmp_path: Path) -> None:
    with opened(tmp_path, FAST) as run:
        worker = ScriptedWorker()
        progress = sweep(run, worker, seconds=1e-9)
        assert progress.out_of_budget
        assert worker.proved == []
        assert reasons(run) == {Reason.UNPROVEN}


def test_accusations_are_of_this_version_only(tmp_path: Path) -> None:
    with opened(tmp_path, FAST) as run:
        sweep(run, ScriptedWorker({("fast", CHECKS[0]): failed()}))
        assert accusations(run)
    newer = routes("fast")
    object.__setattr__(newer["fast"], "version", 2)
    with opened(tmp_path, newer) as run:
        assert accusations(run) == ()
        sweep(run, ScriptedWorker(times={"fast": 5.0}))
        assert reasons(run) == {Reason.PROVEN_FASTER}


def test_no_later_row_lifts_a_failure(tmp_path: Path) -> None:
    with opened(tmp_path, FAST) as run:
        column, route = run.cells[0].cell.column, FAST["fast"]
        worker = ScriptedWorker({("fast", CHECKS[0]): failed()})
        sweep(run, worker, trials=1)
        passed = next(
            proof.result
            for proof in run.repository.all_proofs(run.fingerprint)
            if proof.result.check == CHECKS[0] and proof.result.status is CheckStatus.PASSED
        )
        run.book.save(column, route, passed, "")
        assert run.book.verdict(route, column, "cpu").status is Status.UNSAFE
        assert (
            ProofBook(run.repository, run.fingerprint).verdict(route, column, "cpu").status is Status.UNSAFE
        )


def test_seeds_depend_on_what_they_are_for_only() -> None:
    assert seed_of(7, "a", "b") == seed_of(7, "a", "b")
    seeds = {seed_of(7, "a", "b"), seed_of(8, "a", "b"), seed_of(7, "ab"), seed_of(7, "b", "a")}
    assert len(seeds) == 4
    assert all(0 <= seed < 1 << 31 for seed in seeds)


def test_a_proof_from_before_a_check_of_limits_stays_complete_and_says_so(tmp_path: Path) -> None:
    with opened(tmp_path, FAST) as run:
        sweep(run, ScriptedWorker(times={"fast": 5.0}))
        route, column = run.judge.routes["fast"], run.cells[0].cell.column
        known = run.book.verdict(route, column, "cpu")
        assert known.status is Status.SAFE and known.limits == ()
        rows = run.book._rows[column.id, "fast", route.version]
        del rows["", "extreme_logits"]
        older = run.book.verdict(route, column, "cpu")
        assert older.status is Status.SAFE
        assert older.limits == ("extreme_logits was not run",)
        # and a run fills it in
        assert run.book.missing(route, column, "cpu") == ["extreme_logits"]
        # a row that says nothing is no better than none
        rows["", "extreme_logits"] = replace(
            rows["", "reference"],
            check="extreme_logits",
            status=CheckStatus.UNPROVEN,
            reason=UnprovenReason.OUT_OF_MEMORY,
        )
        assert run.book.verdict(route, column, "cpu").limits == ("extreme_logits was not run",)
        assert run.book.missing(route, column, "cpu") == ["extreme_logits"]
        del rows["", "reference"]
        assert run.book.verdict(route, column, "cpu").status is Status.UNPROVEN


def test_an_unclear_death_is_not_tried_again_until_it_passes(tmp_path: Path) -> None:
    def unclear(job: object) -> Outcome:
        return Broken(UnprovenReason.UNCLEAR, "SIGABRT, after other in the same process", "launch")

    with opened(tmp_path, FAST) as run:
        sweep(run, ScriptedWorker({("fast", CHECKS[1]): unclear}, times={"fast": 5.0}))
        assert reasons(run) == {Reason.UNPROVEN}
    with opened(tmp_path, FAST) as run:
        again = ScriptedWorker(times={"fast": 5.0})
        sweep(run, again)
        assert ("fast", CHECKS[1]) not in again.proved
        assert Reason.PROVEN_FASTER not in reasons(run)
