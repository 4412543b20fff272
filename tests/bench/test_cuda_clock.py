"""The CUDA clock: its logic on a recorded device here, the real one where there is a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch

from autotune.arena.base import Placement
from autotune.arena.plain import PlainArena
from autotune.bench.clock import BenchError, TimingFindingError
from autotune.bench.conditions import Conditions, NvmlMonitor
from autotune.bench.cuda_clock import CudaStand, SameBuffers, device_sets
from autotune.bench.objective import paired_ratios
from autotune.bench.pools import Pools
from autotune.bench.record import Round, RoundSettings
from autotune.bench.rounds import time_cell
from autotune.checks.poison import poisoned
from autotune.domain.cell import Cell, Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.domain.verdict import FailureKind
from autotune.routes.base import Allocate, Capacity, Capture, Family, Need, Step

CELL = Cell(Column(Shape(4, 1, 16, 16), PROFILES["fp32"], 2, 3, 200), 33, 100)


@dataclass
class FakeGpu:
    """Runs a captured body again at each replay, and notes what was asked of it."""

    log: list[str] = field(default_factory=list)
    us: float = 40.0

    def timed(self, launch: Callable[[], None], times: int) -> float:
        for _ in range(times):
            self.log.append("flush")
            launch()
        return self.us * times

    def capture(self, body: Callable[[], None]) -> tuple[Callable[[], None], Callable[[], None]]:
        self.log.append("capture")
        body()
        return body, lambda: self.log.append("freed")

    def synchronize(self) -> None:
        self.log.append("wait")


class Mean:
    """A route that averages the live V of each request, from its own copies of lengths and table.

    ``stale`` keeps what the first ``prepare`` was given, as a graph does whose route ignores its contract.
    """

    family = Family.DECODE
    needs: frozenset[Need] = frozenset()
    deterministic = True
    version = 1

    def __init__(self, capture: Capture = Capture.FREE, stale: bool = False, name: str = "mean") -> None:
        self.name = name
        self.capture = capture
        self.stale = stale
        self.opened: list[MeanSession] = []
        self.prepared: list[int] = []

    def supports(self, column: Column, facts: Facts) -> str | None:
        return None

    def open(self, capacity: Capacity, allocate: Allocate) -> MeanSession:
        self.opened.append(MeanSession(self, len(self.opened), capacity, allocate))
        return self.opened[-1]


class MeanSession:
    def __init__(self, route: Mean, number: int, capacity: Capacity, allocate: Allocate) -> None:
        self.route, self.number = route, number
        column = capacity.column
        self.lens = allocate("lens", (capacity.max_batch_size,), torch.int32)
        self.table = allocate("table", (capacity.max_batch_size, column.table_width), torch.int32)
        self.page = column.shape.page_size
        self.step: Step | None = None
        self.closed = False

    def prepare(self, step: Step) -> None:
        self.route.prepared.append(self.number)
        if self.step is not None and self.route.stale and self.number == 0:
            return
        self.step = step
        self.lens.copy_(step.seq_lens)
        self.table.copy_(step.page_table)

    def run(self, out: torch.Tensor) -> None:
        assert self.step is not None
        # the whole table is gathered and masked, so that nothing depends on the host's knowledge of lengths
        width = int(self.step.k.shape[0])
        ids = self.table.long().clamp(0, width - 1)
        v = self.step.v[ids].flatten(1, 2)[:, :, 0]
        live = torch.arange(v.shape[1], device=v.device)[None, :] < self.lens[:, None]
        weights = live / self.lens[:, None]
        mean = torch.einsum("bt,btd->bd", weights.float(), v.float())
        q_len = out.shape[0] // len(self.lens)
        out.copy_(mean[:, None, None, :].expand(-1, q_len, out.shape[1], -1).flatten(0, 1))

    def close(self) -> None:
        self.closed = True


def stand(gpu: FakeGpu, route: Mean, sets: int = 3) -> tuple[CudaStand, Pools]:
    arena = PlainArena("cpu", Placement.TAIL)
    pools = Pools.build(arena, CELL, count=sets, seed=1, device="cpu", shared=True)
    return CudaStand(gpu, route, pools, lambda *a: arena.tensor(*a)), pools


def test_shared_sets_have_one_table_and_pools_of_their_own() -> None:
    _, pools = stand(FakeGpu(), Mean())
    assert len({id(launch.step.page_table) for launch in pools.sets}) == 1
    assert len({id(launch.step.seq_lens) for launch in pools.sets}) == 1
    for name in ("q", "k", "v"):
        assert len({getattr(launch.step, name).data_ptr() for launch in pools.sets}) == 3
    assert len({launch.out.data_ptr() for launch in pools.sets}) == 3
    before = pools.sets[0].step.page_table.clone()
    pools.new_round(Random(1))
    assert not torch.equal(before, pools.sets[2].step.page_table)
    assert {launch.step.host_kv_lens for launch in pools.sets} == {
        tuple(pools.sets[1].step.seq_lens.tolist())
    }


def test_one_graph_over_all_sets_prepared_once_a_round_and_replayed_cold() -> None:
    gpu, route = FakeGpu(), Mean()
    made, pools = stand(gpu, route)
    assert gpu.log.count("capture") == 1
    assert len(route.opened) == 3
    assert len({session.lens.data_ptr() for session in route.opened}) == 1  # the same buffers
    route.prepared.clear()
    gpu.log.clear()
    pools.new_round(Random(1))
    times = made.measure(7)
    assert times.calls == 9  # whole replays of 3 launches
    assert gpu.log.count("flush") == 3
    assert times.run_us == pytest.approx(40.0 / 3)
    assert route.prepared == [0, 2]  # once for the round, once to compare a replay with an eager launch
    route.prepared.clear()
    pools.new_round(Random(2))
    assert made.measure(1).calls == 3
    assert route.prepared == [0]
    made.close()
    assert gpu.log[-1] == "freed"
    assert all(session.closed for session in route.opened)


def test_a_route_that_cannot_be_captured_is_prepared_for_every_set() -> None:
    gpu, route = FakeGpu(), Mean(Capture.NO)
    made, pools = stand(gpu, route)
    assert "capture" not in gpu.log
    route.prepared.clear()
    pools.new_round(Random(1))
    assert made.measure(3).calls == 3
    assert route.prepared == [0, 1, 2]
    made.close()
    assert "freed" not in gpu.log


def test_a_graph_that_keeps_its_first_lengths_is_found_out() -> None:
    made, pools = stand(FakeGpu(), Mean(stale=True))
    pools.new_round(Random(1))
    with pytest.raises(BenchError, match=r"mean: a graph replay with new lengths .* does not work in place"):
        made.measure(3)


def test_host_time_is_measured_anew_only_where_it_could_matter() -> None:
    gpu, route = FakeGpu(us=3000.0 * 3), Mean()
    made, pools = stand(gpu, route)
    pools.new_round(Random(1))
    first = made.measure(1)
    pools.new_round(Random(2))
    assert made.measure(1).host_us == first.host_us
    gpu.us = 30.0
    assert made.measure(1).host_us != first.host_us


def test_an_error_while_capturing_closes_the_sessions() -> None:
    class Refusing(FakeGpu):
        def capture(self, body: Callable[[], None]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    route = Mean()
    with pytest.raises(
        TimingFindingError, match="mean: cannot be captured: operation not permitted"
    ) as raised:
        stand(Refusing(), route)
    assert raised.value.finding.kind is FailureKind.LAUNCH_ERROR
    assert all(session.closed for session in route.opened)


def test_a_rerun_is_the_replay_that_is_timed_over_poisoned_outputs() -> None:
    gpu, route = FakeGpu(), Mean()
    made, pools = stand(gpu, route)
    pools.new_round(Random(1))
    made.measure(1)
    timed = [launch.out.clone() for launch in pools.sets]
    route.prepared.clear()
    gpu.log.clear()
    assert made.rerun() == pools.sets
    assert route.prepared == [0] and gpu.log == ["wait"]  # one preparation, no capture
    assert all(torch.equal(a, launch.out) for a, launch in zip(timed, pools.sets, strict=True))
    made._launch = lambda: None
    made.rerun()
    assert all(bool(poisoned(launch.out).all()) for launch in pools.sets)


def test_same_buffers_by_name_shape_dtype_and_turn() -> None:
    made: list[str] = []

    def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(name)
        return torch.empty(shape, dtype=dtype)

    same = SameBuffers(allocate)
    one, two = same.for_session(), same.for_session()
    first, second = one("a", (2,), torch.int32), one("a", (2,), torch.int32)
    assert first is not second
    assert two("a", (2,), torch.int32) is first
    assert two("a", (2,), torch.int32) is second
    assert two("a", (3,), torch.int32) is not first
    assert len(made) == 3


def test_how_many_sets_of_what_fits() -> None:
    mib, gib = 2**20, 2**30
    assert device_sets(256 * 1024, 60 * mib, 100 * gib) == 16
    assert device_sets(20 * mib, 60 * mib, 100 * gib) == 7
    assert device_sets(64 * mib, 60 * mib, 100 * gib) == 2
    assert device_sets(gib, 60 * mib, 100 * gib) == 2
    assert device_sets(2 * gib - 1, 60 * mib, 100 * gib) == 2
    # long enough to be a group by itself
    assert device_sets(2 * gib, 60 * mib, 100 * gib) == 1
    assert device_sets(17 * gib, 60 * mib, 100 * gib) == 1
    assert device_sets(64 * gib, 60 * mib, 100 * gib) == 1
    with pytest.raises(BenchError, match=r"one KV pool takes 64.0 GiB, 0.0 GiB are free"):
        device_sets(64 * gib, 60 * mib, -gib)


class Nvml:
    """The bindings' few names, on a driver that does not give power."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception): ...

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:  # noqa: N802
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle: Any, kind: int) -> int:  # noqa: N802
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:  # noqa: N802
        raise self.NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:  # noqa: N802
        return 0x4 | 0x40


def test_what_the_driver_refuses_is_none_and_the_rest_is_read() -> None:
    read = NvmlMonitor(Nvml(), object()).read()
    assert read == Conditions(1980, 3201, 61, None, ("sw_power_cap", "hw_thermal_slowdown"))
    assert read is not None
    assert read.slowdown == "hw_thermal_slowdown"
    assert Conditions.from_dict(read.to_dict()) == read
    assert Conditions(reasons=("sw_power_cap", "gpu_idle")).slowdown == ""


def test_dropped_rounds_give_no_ratio() -> None:
    good = Round(0, ("a", "b"), {"a": 2.0, "b": 1.0}, {}, {}, {})
    bad = replace(good, index=1, run_us={"a": 9.0, "b": 1.0}, dropped="hw_slowdown")
    assert paired_ratios([good, bad], "a", "b") == [2.0]


@pytest.mark.gpu
def test_on_a_gpu_a_route_against_itself_is_a_tie_and_no_launch_finds_its_pool_in_the_cache() -> None:
    column = Column(Shape(8, 1, 128, 64), PROFILES["bf16"], 4, 16, 8192)
    cell = Cell(column, 4096, 8192)
    rounds: list[Round] = []
    told: list[str] = []
    time_cell(
        [Mean(name="one"), Mean(name="two"), Mean(Capture.NO, name="eager")],
        cell,
        Facts("cuda", {}, {}),
        seed=3,
        device="cuda",
        make_arena=lambda placement: PlainArena("cuda", placement),
        settings=RoundSettings(min_group_ms=0.2, max_rounds=24, chunk=8),
        first_round=0,
        go_on=lambda chunk: rounds.extend(chunk) or True,  # type: ignore[func-returns-value]
        phase=told.append,
    )
    assert [one.index for one in rounds] == list(range(24))
    ratios = sorted(paired_ratios(rounds, "one", "two"))
    assert 0.97 < ratios[12] < 1.03
    assert all(one.run_us[name] * one.calls[name] >= 150.0 for one in rounds for name in one.order)
    # V of 16 requests of at least 4096 tokens is read once: no faster than 8 TB/s
    assert min(one.run_us["one"] for one in rounds) > 16 * 4096 * 128 * 2 / 8e6


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_error_is_raised_by_the_measurement_that_met_it() -> None:
    code = (
        "import torch\n"
        "from autotune.bench.cuda_clock import TorchGpu\n"
        "stream = torch.cuda.Stream()\n"
        "with torch.cuda.stream(stream):\n"
        "    gpu = TorchGpu(2**20)\n"
        "    index = torch.full((1,), 9, device='cuda')\n"
        "    table = torch.zeros(4, device='cuda')\n"
        "    try:\n"
        "        gpu.timed(lambda: table[index], 1)\n"
        "    except RuntimeError as error:\n"
        "        print('raised', type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "raised" in done.stdout, done.stderr
