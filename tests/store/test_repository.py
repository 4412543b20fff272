"""One conformance suite, run against SQLite and against a PostgreSQL server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from autotune.domain.cell import Cell
from autotune.domain.decision import Decision, Reason
from autotune.domain.fingerprint import Facts, mismatches
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, UnprovenReason
from autotune.store.errors import RoundsConflictError, StoreError, StudyMismatchError, UnknownStudyError
from autotune.store.records import Fingerprint, Study, Timing, TrialState
from autotune.store.repository import Repository

PASSED = CheckResult(
    "reference",
    1,
    CheckStatus.PASSED,
    seed=2**63 - 1,
    launches=34,
    worst_error=0.0041,
    requires=("finite_pool",),
    limits=("logits > -5e4",),
    placements=("tail", "head"),
    slack=512,
)
FAILED = CheckResult("reference", 1, CheckStatus.FAILED, seed=2, kind=FailureKind.NAN_LEAK, detail="row 3")
UNPROVEN = CheckResult("reference", 1, CheckStatus.UNPROVEN, seed=3, reason=UnprovenReason.BUDGET)


def _rounds(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {"index": index, "order": ["a", "b"], "run_us": {"a": 1.25 + index, "b": 0.1}}
        for index in range(first, first + count)
    ]


class TestFingerprints:
    def test_facts_come_back_exactly(self, repository: Repository, study: Study, facts: Facts) -> None:
        stored = repository.study(study.id).fingerprint
        assert stored.facts == facts
        assert stored.facts.id == facts.id
        assert {type(value) for value in stored.facts.hardware.values()} == {str, int, float}
        assert isinstance(stored.facts.hardware["huge"], float)

    def test_equal_facts_are_one_fingerprint(self, repository: Repository, facts: Facts) -> None:
        first = repository.register_fingerprint(facts)
        second = repository.register_fingerprint(replace(facts, informative={"container": False}))
        assert (first.hardware_id, first.software_id) == (second.hardware_id, second.software_id)

    @pytest.mark.parametrize("value", [True, 1.0, "2", 3])
    def test_a_fact_of_another_type_or_value_is_another_fingerprint(
        self, repository: Repository, facts: Facts, value: Any
    ) -> None:
        other = replace(facts, hardware={**facts.hardware, "cores": value})
        assert mismatches(facts, other)
        assert (
            repository.register_fingerprint(other).hardware_id
            != repository.register_fingerprint(facts).hardware_id
        )


class TestStudies:
    def test_equal_is_resumed(
        self, repository: Repository, fingerprint: Fingerprint, make_study: Callable[..., Study]
    ) -> None:
        first = make_study(repository, fingerprint)
        second = make_study(repository, fingerprint)
        assert (first.resumed, second.resumed) == (False, True)
        assert replace(second, resumed=False) == first
        assert repository.studies() == [second]

    def test_seed_and_code_version_of_the_creation_stay(
        self, repository: Repository, fingerprint: Fingerprint, make_study: Callable[..., Study]
    ) -> None:
        first = make_study(repository, fingerprint)
        second = make_study(repository, fingerprint, seed=5, code_version="c2")
        assert (second.seed, second.code_version) == (first.seed, "c1") == (2**62 + 1, "c1")

    @pytest.mark.parametrize(
        ("name", "value"),
        [("margin", 0.03), ("multiplicity", 81), ("unit", "block4"), ("objectives", ("graph", "step"))],
    )
    def test_another_error_rate_is_refused_in_one_line(
        self,
        repository: Repository,
        fingerprint: Fingerprint,
        make_study: Callable[..., Study],
        name: str,
        value: Any,
    ) -> None:
        made = make_study(repository, fingerprint)
        with pytest.raises(StudyMismatchError, match=f"created with {name} ") as caught:
            make_study(repository, fingerprint, **{name: value})
        assert "\n" not in str(caught.value)
        assert repository.study(made.id).margin == 0.05

    @pytest.mark.parametrize("name", ["space_name", "space_digest", "engine"])
    def test_another_space_or_engine_is_another_study(
        self, repository: Repository, fingerprint: Fingerprint, make_study: Callable[..., Study], name: str
    ) -> None:
        made = make_study(repository, fingerprint)
        assert make_study(repository, fingerprint, **{name: "other"}).id != made.id
        assert len(repository.studies()) == 2

    def test_find(
        self, repository: Repository, fingerprint: Fingerprint, make_study: Callable[..., Study]
    ) -> None:
        assert repository.find_study(fingerprint, "cpu", "d1", "generic") is None
        made = make_study(repository, fingerprint)
        assert repository.find_study(fingerprint, "cpu", "d1", "generic") == replace(made, resumed=True)

    def test_unknown(self, repository: Repository) -> None:
        with pytest.raises(UnknownStudyError, match="no study 'feed'"):
            repository.study("feed")

    def test_times_are_utc(self, repository: Repository, study: Study) -> None:
        created = repository.study(study.id).created_at
        assert created.utcoffset() == timedelta(0)
        assert abs(datetime.now(timezone.utc) - created) < timedelta(minutes=1)


class TestQueue:
    def test_order_numbers_and_resume(
        self, repository: Repository, study: Study, make_cell: Callable[..., Cell]
    ) -> None:
        cells = [make_cell(1), make_cell(2), make_cell(2, 4096), make_cell(3, interval=(2, 4))]
        assert repository.add_cells(study, [(cells[0], ["m"], 7), (cells[1], ["m", "n"], 3)]) == 2
        again = [(each, ["late"], rank) for rank, each in enumerate(cells)]
        assert repository.add_cells(study, again) == 2
        assert repository.add_cells(study, again) == 0
        found = repository.cells(study)
        assert [(each.cell, each.number, each.position) for each in found] == [
            (cells[2], 2, 2),
            (cells[1], 1, 3),
            (cells[3], 3, 3),
            (cells[0], 0, 7),
        ]
        assert [each.models for each in found] == [("late",), ("m", "n"), ("late",), ("m",)]

    def test_pending_are_those_without_decision(
        self, repository: Repository, study: Study, make_cell: Callable[..., Cell]
    ) -> None:
        cells = [make_cell(batch) for batch in (1, 2, 4)]
        repository.add_cells(study, [(each, [], rank) for rank, each in enumerate(cells)])
        repository.save_decision(study, cells[1], Decision(None, Reason.NOT_FASTER))
        assert [each.cell for each in repository.pending(study)] == [cells[0], cells[2]]

    def test_two_studies_share_nothing(
        self,
        repository: Repository,
        fingerprint: Fingerprint,
        study: Study,
        cell: Cell,
        make_study: Callable[..., Study],
    ) -> None:
        other = make_study(repository, fingerprint, engine="sglang")
        repository.add_cells(other, [(cell, [], 0)])
        repository.save_decision(other, cell, Decision("a", Reason.PROVEN_FASTER))
        repository.append_rounds(other, cell, 0, _rounds(0, 2))
        assert repository.decisions(study) == {}
        assert repository.rounds(study, cell) == []
        assert len(repository.pending(study)) == 1

    def test_trials_count_kills_and_retries(self, repository: Repository, study: Study, cell: Cell) -> None:
        first = repository.begin_trial(study, cell, 0, 11)
        assert (first.kills, first.retries, first.state) == (0, 0, TrialState.RUNNING)
        killed = repository.begin_trial(study, cell, 1, 12)
        assert (killed.kills, killed.retries) == (1, 1)
        repository.finish_trial(study, cell, TrialState.INTERRUPTED)
        again = repository.begin_trial(study, cell, 2, 13)
        assert (again.kills, again.retries) == (1, 2)
        repository.finish_trial(study, cell, TrialState.COMPLETE)
        stored = repository.trials(study)
        assert stored == {cell.id: replace(again, state=TrialState.COMPLETE)}
        assert (stored[cell.id].optuna_number, stored[cell.id].optuna_id) == (2, 13)

    def test_finishing_what_was_not_begun(self, repository: Repository, study: Study, cell: Cell) -> None:
        with pytest.raises(ValueError, match="no trial to finish"):
            repository.finish_trial(study, cell, TrialState.COMPLETE)


class TestProofs:
    def test_round_trip(self, repository: Repository, fingerprint: Fingerprint, cell: Cell) -> None:
        repository.save_proof(fingerprint, cell.column, "a", 1, PASSED, "autotune prove ...")
        assert repository.proofs(fingerprint, cell.column, "a", 1) == [PASSED]
        (row,) = repository.all_proofs(fingerprint)
        assert (row.column, row.cell_id, row.route, row.route_version) == (cell.column, None, "a", 1)
        assert (row.result, row.repro) == (PASSED, "autotune prove ...")

    def test_those_with_one_status(
        self, repository: Repository, fingerprint: Fingerprint, cell: Cell
    ) -> None:
        for route, result in (("a", PASSED), ("b", FAILED), ("c", UNPROVEN)):
            repository.save_proof(fingerprint, cell.column, route, 1, result)
        every = repository.all_proofs(fingerprint)
        assert [row.route for row in every] == ["a", "b", "c"]
        assert repository.all_proofs(fingerprint, CheckStatus.FAILED) == [every[1]]

    @pytest.mark.parametrize("value", [math.nan, math.inf, None, 0.0, 5e-324])
    def test_errors_come_back_exactly(
        self, repository: Repository, fingerprint: Fingerprint, cell: Cell, value: float | None
    ) -> None:
        repository.save_proof(fingerprint, cell.column, "a", 1, replace(FAILED, worst_error=value))
        (stored,) = repository.proofs(fingerprint, cell.column, "a", 1)
        assert repr(stored.worst_error) == repr(value)

    def test_text_of_a_dying_child(
        self, repository: Repository, fingerprint: Fingerprint, cell: Cell
    ) -> None:
        detail = "line\x00 \udcff 'quoted' % \u2028 \N{GREEK SMALL LETTER TAU}"
        repository.save_proof(fingerprint, cell.column, "a", 1, replace(FAILED, detail=detail))
        (stored,) = repository.proofs(fingerprint, cell.column, "a", 1)
        assert stored.detail == "line\\x00 \\udcff 'quoted' % \u2028 \N{GREEK SMALL LETTER TAU}"

    @pytest.mark.parametrize(
        ("first", "second", "stays"),
        [
            (PASSED, replace(PASSED, seed=9), PASSED),
            (PASSED, UNPROVEN, PASSED),
            (PASSED, FAILED, FAILED),
            (FAILED, PASSED, FAILED),
            (FAILED, replace(FAILED, seed=9), FAILED),
            (FAILED, UNPROVEN, FAILED),
            (UNPROVEN, PASSED, PASSED),
            (UNPROVEN, FAILED, FAILED),
        ],
    )
    def test_no_second_result_can_lift_a_failure(
        self,
        repository: Repository,
        fingerprint: Fingerprint,
        cell: Cell,
        first: CheckResult,
        second: CheckResult,
        stays: CheckResult,
    ) -> None:
        repository.save_proof(fingerprint, cell.column, "a", 1, first, "first")
        repository.save_proof(fingerprint, cell.column, "a", 1, second, "second")
        assert repository.proofs(fingerprint, cell.column, "a", 1) == [stays]
        (row,) = repository.all_proofs(fingerprint)
        assert row.repro == ("first" if stays is first else "second")

    def test_older_versions_do_not_count(
        self, repository: Repository, fingerprint: Fingerprint, cell: Cell
    ) -> None:
        newer = replace(PASSED, version=2, seed=8)
        other = replace(PASSED, check="repeats")
        column = cell.column
        repository.save_proofs(fingerprint, column, "a", 1, [(newer, ""), (other, ""), (PASSED, "")])
        read = repository.proofs
        assert read(fingerprint, column, "a", 1) == [newer, other]
        assert read(fingerprint, column, "a", 1, {"reference": 2}) == [newer]
        assert read(fingerprint, column, "a", 1, {"reference": 1, "repeats": 1}) == [other, PASSED]
        assert read(fingerprint, column, "a", 1, {"reference": 3}) == []
        assert read(fingerprint, column, "a", 2) == []
        assert read(fingerprint, column, "b", 1) == []
        assert len(repository.all_proofs(fingerprint)) == 3

    def test_a_cells_own_launch_is_apart(
        self, repository: Repository, fingerprint: Fingerprint, cell: Cell
    ) -> None:
        own = replace(PASSED, seed=4)
        repository.save_proof(fingerprint, cell.column, "a", 1, PASSED)
        repository.save_proof(fingerprint, cell, "a", 1, own)
        assert repository.proofs(fingerprint, cell.column, "a", 1) == [PASSED]
        assert repository.proofs(fingerprint, cell, "a", 1) == [own]
        assert [row.cell_id for row in repository.all_proofs(fingerprint)] == [None, cell.id]

    def test_bound_to_the_fingerprint(
        self, repository: Repository, fingerprint: Fingerprint, facts: Facts, cell: Cell
    ) -> None:
        repository.save_proof(fingerprint, cell.column, "a", 1, PASSED)
        upgraded = repository.register_fingerprint(
            replace(facts, software={**facts.software, "torch": "2.13.1"})
        )
        assert repository.proofs(upgraded, cell.column, "a", 1) == []
        assert repository.all_proofs(upgraded) == []

    def test_needs_no_study(
        self, repository: Repository, fingerprint: Fingerprint, make_cell: Callable[..., Cell]
    ) -> None:
        repository.save_proof(fingerprint, make_cell().column, "a", 1, PASSED)
        assert repository.proofs(fingerprint, make_cell().column, "a", 1) == [PASSED]

    def test_all_or_none_of_a_batch(
        self, repository: Repository, fingerprint: Fingerprint, cell: Cell
    ) -> None:
        too_big = replace(PASSED, check="repeats", seed=2**63)
        with pytest.raises(StoreError):
            repository.save_proofs(fingerprint, cell.column, "a", 1, [(PASSED, ""), (too_big, "")])
        assert repository.all_proofs(fingerprint) == []


class TestRounds:
    def test_appended_in_order(self, repository: Repository, study: Study, cell: Cell) -> None:
        assert repository.append_rounds(study, cell, 0, _rounds(0, 4)) == 4
        assert repository.append_rounds(study, cell, 4, _rounds(4, 3)) == 7
        assert repository.append_rounds(study, cell, 7, []) == 7
        assert repository.rounds(study, cell) == _rounds(0, 7)

    def test_a_chunk_told_twice_is_stored_once(
        self, repository: Repository, study: Study, cell: Cell
    ) -> None:
        repository.append_rounds(study, cell, 0, _rounds(0, 4))
        repository.append_rounds(study, cell, 4, _rounds(4, 4))
        assert repository.append_rounds(study, cell, 0, _rounds(0, 4)) == 8
        assert repository.rounds(study, cell) == _rounds(0, 8)

    @pytest.mark.parametrize(("first", "count"), [(5, 4), (3, 4), (0, 3), (-1, 4), (1, 1)])
    def test_a_gap_or_an_overlap_is_refused(
        self, repository: Repository, study: Study, cell: Cell, first: int, count: int
    ) -> None:
        repository.append_rounds(study, cell, 0, _rounds(0, 4))
        with pytest.raises(RoundsConflictError, match=f"has 4 rounds, so rounds from {first} on"):
            repository.append_rounds(study, cell, first, _rounds(first, count))
        assert repository.rounds(study, cell) == _rounds(0, 4)

    def test_a_measurement_is_never_replaced(self, repository: Repository, study: Study, cell: Cell) -> None:
        repository.append_rounds(study, cell, 0, _rounds(0, 4))
        other = _rounds(0, 4)
        other[2]["run_us"]["a"] = 9.0
        with pytest.raises(RoundsConflictError):
            repository.append_rounds(study, cell, 0, other)
        assert repository.rounds(study, cell) == _rounds(0, 4)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_what_is_no_number_is_refused(
        self, repository: Repository, study: Study, cell: Cell, value: float
    ) -> None:
        with pytest.raises(ValueError, match="JSON"):
            repository.append_rounds(study, cell, 0, [{"run_us": value}])
        assert repository.rounds(study, cell) == []

    def test_their_number_follows_what_is_appended_and_what_is_read(
        self, repository: Repository, study: Study, cell: Cell, make_cell: Callable[..., Cell]
    ) -> None:
        assert repository.round_count(study, cell) == 0
        repository.append_rounds(study, cell, 0, _rounds(0, 4))
        assert repository.round_count(study, cell) == 4
        repository.append_rounds(study, cell, 0, _rounds(0, 4))  # told twice
        with pytest.raises(RoundsConflictError):
            repository.append_rounds(study, cell, 5, _rounds(5, 4))
        with pytest.raises(StoreError):
            repository.append_rounds(study, make_cell(32), 0, _rounds(0, 1))
        assert repository.round_count(study, cell) == 4
        assert repository.round_count(study, make_cell(32)) == 0
        other = Repository(repository.database)
        assert other.append_rounds(study, cell, 4, _rounds(4, 3)) == 7
        assert len(repository.rounds(study, cell)) == repository.round_count(study, cell) == 7

    def test_needs_the_cell(
        self, repository: Repository, study: Study, make_cell: Callable[..., Cell]
    ) -> None:
        with pytest.raises(StoreError) as caught:
            repository.append_rounds(study, make_cell(32), 0, _rounds(0, 1))
        assert "\n" not in str(caught.value)


class TestAnswers:
    def test_timings_are_replaced(self, repository: Repository, study: Study, cell: Cell) -> None:
        repository.save_timings(study, cell, [Timing("b", 4, 1, 2), Timing("a", 4)])
        final = Timing("b", 8, 5, 2, 10.5, 11.0, 0.25, {"e_plus": 12.5, "dropped": 0})
        repository.save_timing(study, cell, final)
        assert repository.timings(study, cell) == [Timing("a", 4), final]
        assert repository.all_timings(study) == {cell.id: [Timing("a", 4), final]}

    def test_decisions_are_replaced(self, repository: Repository, study: Study, cell: Cell) -> None:
        repository.save_decision(study, cell, Decision(None, Reason.UNDECIDED, "128 rounds"))
        assert repository.summary(study).undecided == 1
        final = Decision("a", Reason.PROVEN_FASTER, "19 rounds", 1.05, 1.12, 0.99)
        repository.save_decision(study, cell, final)
        assert repository.decisions(study) == {cell.id: final}
        assert repository.summary(study).undecided == 0


class TestUpkeep:
    def test_selftest_counts_for_its_code_and_fingerprint(
        self, repository: Repository, fingerprint: Fingerprint, facts: Facts
    ) -> None:
        results = [{"control": "oob_read", "detected": True}]
        repository.save_selftest(fingerprint, "c1", passed=False, results=[])
        repository.save_selftest(fingerprint, "c1", passed=True, results=results)
        stored = repository.selftest(fingerprint, "c1")
        assert stored is not None
        assert (stored.passed, stored.results) == (True, results)
        assert repository.selftest(fingerprint, "c2") is None
        other = repository.register_fingerprint(replace(facts, hardware={**facts.hardware, "threads": 2}))
        assert repository.selftest(other, "c1") is None

    def test_quarantine(self, repository: Repository, fingerprint: Fingerprint, cell: Cell) -> None:
        repository.add_quarantine(fingerprint, cell, "a", "seen in production")
        repository.add_quarantine(fingerprint, cell, "a", "seen twice")
        repository.add_quarantine(fingerprint, cell.column, "a", "to be sure")
        found = repository.quarantined(fingerprint)
        assert [(each.cell_id, each.reason) for each in found] == [
            (cell.id, "seen twice"),
            (None, "to be sure"),
        ]
        assert {each.column for each in found} == {cell.column}
        assert repository.lift_quarantine(fingerprint, cell, "a") is True
        assert repository.lift_quarantine(fingerprint, cell, "a") is False
        assert [each.cell_id for each in repository.quarantined(fingerprint)] == [None]

    def test_exports(self, repository: Repository, study: Study) -> None:
        repository.record_export(study, "table", "tuned_configs/cpu.generic.yaml", "sha256:ab")
        (found,) = repository.exports(study)
        assert (found.kind, found.path, found.digest) == (
            "table",
            "tuned_configs/cpu.generic.yaml",
            "sha256:ab",
        )

    def test_summary(
        self,
        repository: Repository,
        fingerprint: Fingerprint,
        study: Study,
        make_cell: Callable[..., Cell],
    ) -> None:
        empty = repository.summary(study)
        assert (empty.cells, empty.decided, empty.unsafe, empty.kills) == (0, 0, 0, 0)
        cells = [make_cell(batch, kv) for batch in (1, 2) for kv in (1024, 4096)]
        repository.add_cells(study, [(each, [], rank) for rank, each in enumerate(cells)])
        repository.save_proof(fingerprint, cells[0].column, "a", 1, FAILED)
        repository.save_proof(fingerprint, cells[0].column, "a", 1, replace(FAILED, check="repeats"))
        repository.save_proof(fingerprint, cells[2].column, "a", 1, PASSED)
        repository.save_proof(fingerprint, make_cell(64).column, "a", 1, FAILED)  # not of this study
        repository.save_decision(study, cells[0], Decision(None, Reason.CANDIDATE_UNSAFE))
        repository.save_decision(study, cells[2], Decision("a", Reason.PROVEN_FASTER))
        repository.save_decision(study, cells[3], Decision("a", Reason.PROVEN_FASTER))
        for number in range(3):
            repository.begin_trial(study, cells[0], number, number)
        found = repository.summary(study)
        assert (found.cells, found.decided, found.undecided) == (4, 3, 0)
        assert found.reasons == {"candidate_unsafe": 1, "proven_faster": 2}
        assert found.routes == {"a": 2}
        assert found.checks == {"failed": 2, "passed": 1}
        assert (found.unsafe, found.kills, found.retries) == (1, 2, 2)
