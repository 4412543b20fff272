from __future__ import annotations

import pickle
from dataclasses import asdict, replace
from typing import Any

import pytest

from autotune.bench.record import Round, RoundSettings
from autotune.checks.controls import COLUMN, KV_LENS, SEED
from autotune.domain.cell import Cell
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, UnprovenReason
from autotune.worker.base import Broken, Completed, Failed, JobError
from autotune.worker.failure import FaultSite
from autotune.worker.jobs import ProveJob, TimeJob, prove, row_of, run_check
from autotune.worker.worker import Worker

FACTS = Facts(
    "cpu", {"name": "test", "cores": 1, "threads": 1, "isa": ""}, {"torch": "2", "torch_commit": "x"}
)
JOB = ProveJob(
    route="torch-sdpa",
    check="reference",
    column=COLUMN.to_dict(),
    facts=FACTS.to_dict(),
    kv_lens=KV_LENS,
    seed=SEED,
    device="cpu",
    arena_kind="host_mmap",
)
SETTINGS = RoundSettings(
    min_group_ms=0.2, discard_rounds=1, discard_ms=0.0, max_rounds=8, chunk=2, operand_sets=2
)
TIME_JOB = TimeJob(
    routes=("torch-sdpa", "torch-splitkv"),
    cell=Cell(COLUMN, 32, 64).to_dict(),
    facts=FACTS.to_dict(),
    seed=1,
    device="cpu",
    arena_kind="host_mmap",
    settings=asdict(SETTINGS),
)


@pytest.mark.parametrize("job", [JOB, TIME_JOB])
def test_jobs_travel_as_plain_data(job: Any) -> None:
    pickled = pickle.dumps(job)
    assert pickle.loads(pickled) == job
    assert b"torch.nn" not in pickled
    assert len(pickled) < 2000


@pytest.mark.parametrize("route", ["torch-sdpa", "torch-splitkv"])
def test_a_right_route_passes(worker: Worker, route: str) -> None:
    row = prove(worker, replace(JOB, route=route))
    assert row.status is CheckStatus.PASSED, row
    assert row.launches > 0
    assert row.placements == ("tail", "head")
    assert (row.requires, row.slack, row.seed) == ((), 0, SEED)


def test_a_wrong_answer_is_the_checks_own_row_and_needs_no_new_child(worker: Worker) -> None:
    prove(worker, JOB)
    pid = worker.pid
    row = prove(worker, replace(JOB, route="planted-scale-dropped"))
    assert row.kind is FailureKind.WRONG_OUTPUT
    assert worker.pid == pid


def test_an_overread_within_the_padding_passes_and_says_what_it_needs(worker: Worker) -> None:
    row = prove(worker, replace(JOB, route="planted-tail-padding"))
    assert row.status is CheckStatus.PASSED, row
    assert row.requires == ("tail_padding_512",)
    assert row.slack == 512
    assert row.detail.startswith(
        "passes with 512 bytes after each operand; without: SIGSEGV, q: 0 bytes past"
    )


@pytest.mark.parametrize("route", ["planted-write-past-end", "planted-read-past-end"])
def test_an_overrun_beyond_the_padding_stays_a_fault(worker: Worker, route: str) -> None:
    row = prove(worker, replace(JOB, route=route))
    assert row.status is CheckStatus.FAILED
    assert row.kind is FailureKind.ILLEGAL_ACCESS
    assert (row.requires, row.slack, row.launches) == ((), 0, 2)
    assert "0 bytes past the end" in row.detail
    assert row.detail.endswith("with 512 bytes of padding: illegal_access")


def test_padding_behind_an_operand_excuses_no_read_in_front_of_it(worker: Worker) -> None:
    row = prove(worker, replace(JOB, route="planted-read-before-start"))
    assert row.status is CheckStatus.FAILED
    assert row.kind is FailureKind.ILLEGAL_ACCESS
    assert "64 bytes before the start" in row.detail
    assert row.launches == 1


def test_a_write_into_the_padding_is_seen(worker: Worker) -> None:
    row = run_check(worker, replace(JOB, route="planted-extra-row", check="reference", slack=512))
    assert row.kind is FailureKind.OUT_OF_BOUNDS_WRITE


def test_a_fault_far_away_stays_a_fault(worker: Worker) -> None:
    row = prove(worker, replace(JOB, route="planted-garbage-followed", check="table_garbage"))
    assert row.kind is FailureKind.ILLEGAL_ACCESS
    assert "kv_cache: " in row.detail


def test_the_row_of_a_dead_child_has_check_version_seed_and_launches(worker: Worker) -> None:
    row = run_check(worker, replace(JOB, route="planted-abort"))
    clean = run_check(worker, JOB)
    assert (row.kind, row.check, row.seed) == (FailureKind.CRASH, "reference", SEED)
    assert row.version == clean.version
    # it died in its first launch; opening the session is not one
    assert row.launches == 1
    assert row.detail.startswith("SIGABRT")
    assert "reference/tail" in row.detail


def test_a_hang_is_its_own_kind(worker: Worker) -> None:
    row = prove(worker, replace(JOB, route="planted-hang"), step_timeout_s=1.0)
    assert row.kind is FailureKind.HANG
    assert row.detail.startswith("no progress for 1 s (reference/tail")


def test_a_check_that_says_nothing_leaves_a_row(worker: Worker) -> None:
    row = prove(worker, replace(JOB, check="interior_batch"))
    assert row.status is CheckStatus.NOT_APPLICABLE
    assert "not an interval" in row.detail


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"route": "no-such-route"}, "no-such-route"),
        ({"route": "planted-nothing"}, "planted-nothing"),
        ({"check": "no_such_check"}, "no check is called 'no_such_check'"),
        ({"arena_kind": "heap"}, "unknown arena 'heap'"),
        ({"column": {}}, "KeyError"),
    ],
)
def test_a_job_that_makes_no_sense_accuses_nobody(worker: Worker, change: dict[str, Any], text: str) -> None:
    row = prove(worker, replace(JOB, **change))
    assert row.status is CheckStatus.UNPROVEN
    assert row.reason is UnprovenReason.INFRASTRUCTURE
    assert text in row.detail


def test_rows_of_outcomes() -> None:
    failed = Failed(
        FailureKind.ILLEGAL_ACCESS, "SIGSEGV", "launch 3", FaultSite("SIGSEGV", 1, True, "q", 0), steps=3
    )
    row = row_of(replace(JOB, slack=512), failed)
    assert (row.kind, row.detail, row.launches, row.slack) == (
        FailureKind.ILLEGAL_ACCESS,
        "SIGSEGV (launch 3)",
        3,
        512,
    )
    row = row_of(JOB, Broken(UnprovenReason.OUT_OF_MEMORY, "MemoryError", ""))
    assert (row.status, row.reason, row.detail) == (
        CheckStatus.UNPROVEN,
        UnprovenReason.OUT_OF_MEMORY,
        "MemoryError",
    )
    row = row_of(JOB, JobError("ValueError", "no\n  way", "launch 1", 1))
    assert (row.reason, row.detail) == (UnprovenReason.INFRASTRUCTURE, "ValueError: no way (launch 1)")
    passed = CheckResult("reference", 1, CheckStatus.PASSED, SEED, launches=4)
    assert row_of(JOB, Completed({**passed.to_dict(), "route": JOB.route})) == passed


@pytest.mark.parametrize("change", [{"check": "strides"}, {"seed": SEED + 1}, {"route": "torch-splitkv"}])
def test_a_row_about_something_else_is_no_row(change: dict[str, Any]) -> None:
    passed = CheckResult("reference", 1, CheckStatus.PASSED, SEED, launches=4)
    row = row_of(JOB, Completed({**passed.to_dict(), "route": JOB.route, **change}))
    assert (row.check, row.seed) == ("reference", SEED)
    assert (row.status, row.reason) == (CheckStatus.UNPROVEN, UnprovenReason.INFRASTRUCTURE)
    assert "the child answered for " in row.detail


def test_the_childs_row_names_its_route(worker: Worker) -> None:
    outcome = worker.run(JOB, timeout_s=60)
    assert isinstance(outcome, Completed)
    assert outcome.value["route"] == JOB.route


def test_rounds_are_handed_over_chunk_by_chunk_until_the_parent_has_enough(worker: Worker) -> None:
    chunks: list[list[Round]] = []

    def store(payload: dict[str, Any]) -> bool:
        chunks.append([Round.from_dict(data) for data in payload["rounds"]])
        return len(chunks) < 3

    outcome = worker.run(TIME_JOB, timeout_s=60, on_event=store)
    assert outcome == Completed(6)
    assert [[round_.index for round_ in chunk] for chunk in chunks] == [[0, 1], [2, 3], [4, 5]]
    assert set(chunks[0][0].order) == {"torch-sdpa", "torch-splitkv"}


def test_a_resumed_cell_goes_on_with_the_next_round_and_the_routes_still_alive(worker: Worker) -> None:
    seen: list[Round] = []

    def keep_one(payload: dict[str, Any]) -> list[str]:
        seen.extend(Round.from_dict(data) for data in payload["rounds"])
        return ["torch-sdpa"]

    outcome = worker.run(replace(TIME_JOB, first_round=4), timeout_s=60, on_event=keep_one)
    assert outcome == Completed(4)
    assert [round_.index for round_ in seen] == [4, 5, 6, 7]
    assert [len(round_.order) for round_ in seen] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("route", "kind"),
    [("planted-null-pointer", FailureKind.CRASH), ("planted-hang", FailureKind.HANG)],
)
def test_a_death_while_timing_names_the_route(worker: Worker, route: str, kind: FailureKind) -> None:
    job = replace(TIME_JOB, routes=("torch-sdpa", route))
    outcome = worker.run(job, timeout_s=60, step_timeout_s=2.0)
    assert isinstance(outcome, Failed), outcome
    assert outcome.kind is kind
    assert outcome.step.startswith(f"{route}: timing ")
