"""Routes that are right when they are proven and wrong, or raise, when they are timed."""

from __future__ import annotations

import pickle
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from autotune.arena.base import ArenaError
from autotune.arena.plain import PlainArena
from autotune.bench import rounds as bench_rounds
from autotune.bench.clock import BenchError, HostClock, TimingFindingError
from autotune.bench.cuda_clock import CudaStand
from autotune.bench.outputs import Outputs
from autotune.bench.record import Finding, Round, RoundSettings
from autotune.bench.rounds import time_cell
from autotune.checks import oracle
from autotune.domain.cell import Cell, Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.domain.verdict import FailureKind
from autotune.routes.base import Capture
from autotune.routes.planted import CleanSession, Planted
from autotune.worker import jobs
from autotune.worker.base import Completed, Failed
from autotune.worker.jobs import TimeJob, timed

FACTS = Facts("cpu", {}, {})
CELL = Cell(Column(Shape(4, 1, 64, 16), PROFILES["bf16"], 2, 3, 200), 33, 100)
SETTINGS = RoundSettings(
    min_group_ms=0.01, discard_rounds=3, discard_ms=0.0, max_rounds=6, chunk=2, operand_sets=3
)
TIMED = 3 + 2  # calls of a route before its outputs are looked at first


class Named(Planted):
    """A session class of this test under a name."""

    session: type[CleanSession]
    shown: str

    def __init__(self, shown: str, session: type[CleanSession] = CleanSession) -> None:
        super().__init__("planted-clean")
        object.__setattr__(self, "session", session)
        object.__setattr__(self, "name", shown)

    def __post_init__(self) -> None: ...

    def open(self, capacity: Any, allocate: Any) -> CleanSession:
        return self.session(capacity, allocate)


class Late(CleanSession):
    """Right until it has been called often enough for a proof to be over."""

    calls = 0

    def run(self, out: torch.Tensor) -> None:
        self.calls += 1
        super().run(out)
        if self.calls > TIMED:
            self.spoil(out)

    def spoil(self, out: torch.Tensor) -> None:
        raise NotImplementedError


class WrongLate(Late):
    def spoil(self, out: torch.Tensor) -> None:
        out[-1, -1] *= 1.1


class NanLate(Late):
    def spoil(self, out: torch.Tensor) -> None:
        out[2, 1, 0] = torch.nan


class Skips(CleanSession):
    """Launches nothing the second time on the same lengths."""

    def prepare(self, step: Any) -> None:
        self.again = step.seq_lens.tolist() == getattr(self, "lens", None)
        super().prepare(step)

    def run(self, out: torch.Tensor) -> None:
        if not self.again:
            super().run(out)


class RaisesLate(Late):
    def spoil(self, out: torch.Tensor) -> None:
        raise ValueError("no such\n tile")


def run(*routes: Named, settings: RoundSettings = SETTINGS, told: list[str] | None = None) -> list[Round]:
    rounds: list[Round] = []

    def report(chunk: list[Round]) -> bool:
        rounds.extend(chunk)
        return True

    launching = (lambda text: None) if told is None else told.append
    time_cell(
        list(routes),
        CELL,
        FACTS,
        seed=1,
        device="cpu",
        make_arena=lambda placement: PlainArena("cpu", placement),
        settings=settings,
        first_round=0,
        go_on=report,
        launching=launching,
    )
    return rounds


def accused(*routes: Named, **more: Any) -> Finding:
    with pytest.raises(TimingFindingError) as raised:
        run(*routes, **more)
    return raised.value.finding


def test_right_routes_are_timed_to_the_end() -> None:
    assert len(run(Named("fallback"), Named("a"), Named("b"))) == SETTINGS.max_rounds


@pytest.mark.parametrize(
    ("session", "kind", "text"),
    [
        (WrongLate, FailureKind.WRONG_OUTPUT, "at request 2 query 1 head 3, kv_len "),
        (
            NanLate,
            FailureKind.NAN_LEAK,
            "1 of 1536 elements not finite, first at request 1 query 0 head 1, kv_len",
        ),
        (Skips, FailureKind.UNWRITTEN_OUTPUT, "1536 of 1536 elements left unwritten, first at request 0"),
        (RaisesLate, FailureKind.LAUNCH_ERROR, "a launch while timing raised ValueError: no such tile"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_whoever_is_at_fault_is_accused_be_it_the_fallback(
    session: type[CleanSession], kind: FailureKind, text: str, place: int
) -> None:
    routes = [Named("fallback"), Named("a"), Named("b")]
    routes[place] = Named("bad", session)
    finding = accused(*routes)
    assert (finding.route, finding.kind) == ("bad", kind)
    assert text in finding.detail and "\n" not in finding.detail
    assert pickle.loads(pickle.dumps(finding)) == finding


def test_the_chunk_of_a_finding_is_not_reported_and_the_route_is_named_while_it_runs() -> None:
    told: list[str] = []
    reported: list[list[Round]] = []
    with pytest.raises(TimingFindingError):
        time_cell(
            [Named("fallback"), Named("bad", RaisesLate)],
            CELL,
            FACTS,
            seed=1,
            device="cpu",
            make_arena=lambda placement: PlainArena("cpu", placement),
            settings=SETTINGS,
            first_round=0,
            go_on=lambda chunk: reported.append(chunk) or True,  # type: ignore[func-returns-value]
            launching=told.append,
        )
    assert reported == []
    assert told[-1] == "bad"


def test_two_that_differ_within_what_both_may_are_left_alone() -> None:
    class Off(CleanSession):
        factor = 1.0

        def scale(self) -> float:
            return super().scale() * self.factor

        def store(self, out: torch.Tensor, row: int, result: torch.Tensor) -> None:
            super().store(out, row, result * (1 + self.off))

        off = 0.0

    bound = oracle.bound(CELL.column)
    low = type("Low", (Off,), {"off": -0.7 * bound})
    high = type("High", (Off,), {"off": 0.7 * bound})
    assert len(run(Named("low", low), Named("high", high))) == SETTINGS.max_rounds
    far = type("Far", (Off,), {"off": 3 * bound})
    assert accused(Named("low", low), Named("far", far)).route == "far"


def test_the_oracle_is_asked_only_where_two_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    plain = oracle.reference
    monkeypatch.setattr(oracle, "reference", lambda operands: asked.append(1) or plain(operands))  # type: ignore[func-returns-value]
    run(Named("fallback"), Named("a"))
    assert asked == []
    accused(Named("fallback"), Named("bad", WrongLate))
    assert asked == [1]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("host"),
        ArenaError("no address space"),
        ImportError("libx.so"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_says_nothing_of_the_kernel_accuses_nobody(error: Exception) -> None:
    class Raises(CleanSession):
        def run(self, out: torch.Tensor) -> None:
            raise error

    with pytest.raises(type(error)):
        run(Named("fallback"), Named("a", Raises))


def test_a_session_that_cannot_be_opened_accuses_nobody() -> None:
    class Closed(CleanSession):
        def __init__(self, *args: Any) -> None:
            raise ValueError("no plan")

    with pytest.raises(BenchError, match=r"^a: open for timing raised ValueError: no plan$"):
        run(Named("fallback"), Named("a", Closed))


class EmulatedGpu:
    """A graph is its body run again."""

    def timed(self, launch: Any, times: int) -> float:
        for _ in range(times):
            launch()
        return 40.0 * times

    def capture(self, body: Any) -> tuple[Any, Any]:
        return body, lambda: None

    def synchronize(self) -> None: ...


class GraphClock(HostClock):
    """The CUDA stand on an emulated device."""

    shared_metadata = True

    def stand(self, route: Any, pools: Any, allocate: Any) -> Any:
        return CudaStand(EmulatedGpu(), route, pools, allocate)


class Replayed(Named):
    capture = Capture.FREE


class Device(CleanSession):
    """Keeps lengths and table in the buffers that the sessions of a graph share."""

    def __init__(self, capacity: Any, allocate: Any) -> None:
        super().__init__(capacity, allocate)
        self.buffer = allocate("lens", (capacity.max_batch_size,), torch.int32)

    def prepare(self, step: Any) -> None:
        super().prepare(step)
        self.buffer.copy_(step.seq_lens)

    def run(self, out: torch.Tensor) -> None:
        self.lens = self.buffer.tolist()
        super().run(out)


class WrongInSet(Device):
    """Wrong on its third launch and every third after it: on one of three operand sets."""

    opened = 0

    def __init__(self, capacity: Any, allocate: Any) -> None:
        super().__init__(capacity, allocate)
        type(self).opened += 1
        self.number = type(self).opened

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        if self.number % 3 == self.wrong:
            out[0] *= 1.5

    wrong = 2


def test_graphs_are_looked_at_as_they_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_rounds, "clock_for", lambda device: GraphClock())
    assert len(run(Replayed("fallback", Device), Replayed("a", Device))) == SETTINGS.max_rounds
    # the set that was prepared is the route's own doing, a difference between sets may be ours
    first = type("First", (WrongInSet,), {"wrong": 1})
    assert accused(Replayed("fallback", Device), Replayed("bad", first)).kind is FailureKind.WRONG_OUTPUT
    with pytest.raises(BenchError, match=r"^bad: a replay differs by 0\.5[0-9]* between sets"):
        run(Replayed("fallback", Device), Replayed("bad", WrongInSet))


def test_bounds_follow_each_routes_arithmetic() -> None:
    from autotune.routes.arithmetic import Arithmetic

    class Coarse(Named):
        arithmetic = Arithmetic(logits="bf16")

    outputs = Outputs(CELL, FACTS, [Named("fine"), Coarse("coarse")], "cpu")
    assert outputs._bounds["coarse"] > outputs._bounds["fine"]


def test_a_job_hands_its_finding_over_as_the_failure_of_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def among(self, texts: Any) -> Any:
            return lambda index: None

        def step(self, text: str, *, launch: bool = True) -> None: ...

        def emit(self, payload: Any) -> None: ...

        def ask(self, payload: Any) -> bool:
            return True

    routes = {"fallback": Named("fallback"), "bad": Named("bad", WrongLate)}
    monkeypatch.setattr(jobs, "child_route", routes.__getitem__)
    job = TimeJob(
        routes=("fallback", "bad"),
        cell=CELL.to_dict(),
        facts=FACTS.to_dict(),
        seed=1,
        device="cpu",
        arena_kind="plain",
        settings=asdict(SETTINGS),
    )
    outcome = timed(Completed(job(Silent())))
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.step) == (FailureKind.WRONG_OUTPUT, "bad: timing")
    good = replace(job, routes=("fallback",))
    assert timed(Completed(good(Silent()))) == Completed(SETTINGS.max_rounds)
