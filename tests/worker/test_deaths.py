"""A child that dies in any way at any step: no verdict is lost, nobody else is marked, nothing lives on.

The whole matrix is run with ``AUTOTUNE_FULL_MATRIX=1``; otherwise every step is met by some ways and every
way by some steps, the same ones each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from autotune.bench.record import Round
from autotune.domain.verdict import CheckStatus, FailureKind, UnprovenReason
from autotune.worker import process
from autotune.worker.base import Broken, Completed, Failed, JobError, Outcome
from autotune.worker.jobs import prove, timed
from autotune.worker.worker import Worker
from tests.worker.deaths import (
    FULL,
    MORTAL,
    PROVE_STEPS,
    SLOW,
    TIME_STEPS,
    WAYS,
    Fault,
    MortalProve,
    MortalTime,
    expected,
)
from tests.worker.test_jobs import JOB, TIME_JOB
from tests.worker.test_lifetime import assert_gone, descendants

X, Y = MORTAL + "x", MORTAL + "y"
PROVE_X = MortalProve(**{**vars(JOB), "route": X, "check": "position_coded"})
TIME = MortalTime(**{**vars(TIME_JOB), "routes": ("torch-sdpa", X)})
# Room for a busy machine to get from one step to the next; a hang costs it once.
STEP_TIMEOUT_S = 1.5


def chosen(steps: dict[str, str], every: int) -> list[Any]:
    """Faults of the matrix, or every so many of them along its diagonals."""
    found = []
    for row, step in enumerate(steps):
        for column, way in enumerate(WAYS):
            distance = (column + 3 * row) % len(WAYS)
            slow = 5 if way in SLOW else 1
            if FULL or distance % (every * slow) == 0:
                orphan = (None, "same", "session")[(row + column) % 3]
                fault = Fault(way, step, orphan=orphan)
                found.append(pytest.param(fault, id=str(fault).replace(" ", "-")))
    return found


@pytest.fixture(scope="module")
def family() -> set[int]:
    """Processes that may be there: the fork server, the resource tracker, what other tests hold."""
    with Worker("cpu") as first:
        first.run(JOB, timeout_s=60.0)
    return descendants(os.getpid())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that closed its pipe has this long to end by itself."""
    monkeypatch.setattr(process, "_REAP_TIMEOUT_S", 1.0)


@pytest.fixture(scope="module")
def prover(family: set[int]) -> Iterator[Worker]:
    with Worker("cpu", step_timeout_s=30.0) as worker:
        yield worker


def proven(worker: Worker, job: MortalProve) -> Any:
    whole, step = patience(job.fault, PROVE_STEPS)
    return prove(worker, job, timeout_s=whole, step_timeout_s=step)


def patience(fault: Fault | None, steps: dict[str, str]) -> tuple[float, float | None]:
    """Seconds for a job and for a step of it: few where they will be used up."""
    # after half a message, whatever survives is waited for
    half = fault is not None and fault.step.endswith(" half")
    if fault is None or (fault.way not in SLOW and not half):
        return 60.0, None
    stalled = fault.way == "stall" or half
    if steps[fault.step] == "ours" and not stalled:
        return STEP_TIMEOUT_S, None
    return 60.0, STEP_TIMEOUT_S


def assert_nothing_left(worker: Worker, family: set[int]) -> None:
    """Nobody but the child, if it lives; and with it goes what it started."""
    child = {worker.pid} - {None}
    mine = descendants(os.getpid()) - family - child
    if child:
        mine -= descendants(next(iter(child)) or 0)
    assert_gone(mine)


@pytest.mark.parametrize("fault", chosen(PROVE_STEPS, 8))
def test_a_death_while_proving(fault: Fault, prover: Worker, family: set[int]) -> None:
    whose = PROVE_STEPS[fault.step]
    nth = {"run": 3, "judge": 2, "prepare": 2}.get(fault.step, 1)
    before = prove(prover, replace(PROVE_X, check="reference"))
    assert before.status is CheckStatus.PASSED, before

    row = proven(prover, replace(PROVE_X, fault=replace(fault, nth=nth)))
    assert (row.check, row.seed) == (PROVE_X.check, PROVE_X.seed)
    if whose in ("after", "late"):
        assert row.status is CheckStatus.PASSED, row
    else:
        kind = expected(fault, whose)
        assert (row.kind or row.reason) is kind, row
        assert (row.status is CheckStatus.FAILED) == isinstance(kind, FailureKind)
    # whatever it left behind is not the next one's
    other = prove(prover, replace(PROVE_X, route=Y, check="reference"), step_timeout_s=STEP_TIMEOUT_S)
    if whose == "late":
        assert other.status is not CheckStatus.FAILED, other
    else:
        assert other.status is CheckStatus.PASSED, other
    again = prove(prover, PROVE_X)
    assert again.status is CheckStatus.PASSED, again
    assert prove(prover, replace(PROVE_X, check="reference")) == before
    assert_nothing_left(prover, family)


@pytest.mark.parametrize("fault", chosen(TIME_STEPS, 16))
def test_a_death_while_timing(fault: Fault, prover: Worker, family: set[int]) -> None:
    whose = TIME_STEPS[fault.step]
    late = fault.step in (
        "phase rounds",
        "prepare",
        "run",
        "phase look",
        "run in look",
        "phase report",
        "ask half",
    )
    reports = int(late)
    rounds: list[Round] = []

    def store(payload: dict[str, Any]) -> bool:
        rounds.extend(Round.from_dict(data) for data in payload["rounds"])
        return True

    def time_it(job: MortalTime) -> Outcome:
        whole, step = patience(fault, TIME_STEPS)
        if job.fault is None:
            whole = 60.0
        return timed(prover.run(job, timeout_s=whole, step_timeout_s=step, on_event=store))

    outcome = time_it(replace(TIME, fault=replace(fault, reports=reports)))
    if whose == "after":
        assert outcome == Completed(TIME.settings["max_rounds"])
    elif isinstance(kind := expected(fault, whose), FailureKind):
        assert isinstance(outcome, Failed), outcome
        assert outcome.kind is kind
        assert outcome.step.startswith(f"{X}: ")
    elif isinstance(outcome, JobError):
        assert kind is UnprovenReason.INFRASTRUCTURE, outcome
    else:
        assert isinstance(outcome, Broken), outcome
        assert outcome.reason is kind, outcome
    # what was reported before it stands, and the rest follows
    there = list(rounds)
    if late or fault.step == "told":
        assert [each.index for each in there] == list(range(TIME.settings["chunk"]))
    elif whose != "after" and fault.step not in ("phase close", "close session"):
        assert there == []
    resumed = time_it(replace(TIME, first_round=len(there)))
    assert resumed == Completed(int(TIME.settings["max_rounds"]) - len(there))
    assert rounds[: len(there)] == there
    assert [each.index for each in rounds] == list(range(TIME.settings["max_rounds"]))
    assert_nothing_left(prover, family)


@pytest.mark.parametrize("orphan", ["same", "session"])
@pytest.mark.parametrize("way", ["raise", "abort"])
def test_what_a_child_started_ends_with_its_worker(way: str, orphan: str, prover: Worker) -> None:
    before = descendants(os.getpid())
    with Worker("cpu", step_timeout_s=STEP_TIMEOUT_S) as worker:
        prove(worker, replace(PROVE_X, fault=Fault(way, "run", orphan=orphan)))
    assert_gone(descendants(os.getpid()) - before)
