"""Rounds with small routes of the test's own, on real operands and the real clock."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from autotune.arena.base import Placement
from autotune.arena.plain import PlainArena
from autotune.bench import rounds as bench_rounds
from autotune.bench.clock import BenchError, GroupTimes, HostClock, HostStand, Launch
from autotune.bench.conditions import Conditions
from autotune.bench.pools import (
    Pools,
    draw_kv_lens,
    last_level_cache_bytes,
    operand_sets,
    pool_bytes,
)
from autotune.bench.rounds import Round, RoundSettings, time_cell
from autotune.domain.cell import Cell, Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.routes.base import Allocate, Capacity, Capture, Family, Need, Step

FACTS = Facts("cpu", {}, {})
CELL = Cell(Column(Shape(4, 1, 16, 16), PROFILES["fp32"], 2, 3, 200), 33, 100)
QUICK = RoundSettings(
    min_group_ms=0.05, discard_rounds=3, discard_ms=0.0, max_rounds=12, chunk=4, operand_sets=3
)


@dataclass
class Seen:
    """What a session was given, call by call."""

    lens: list[tuple[int, ...]] = field(default_factory=list)
    tables: list[list[list[int]]] = field(default_factory=list)
    pools: list[int] = field(default_factory=list)
    quiet: set[tuple[bool, bool, int]] = field(default_factory=set)
    closed: int = 0


class Loop:
    """A route that does ``work`` small matrix products a call and notes what it sees."""

    family = Family.DECODE
    capture = Capture.NO
    needs: frozenset[Need] = frozenset()
    deterministic = True
    version = 1

    def __init__(self, name: str, work: int = 1, seen: Seen | None = None, reason: str | None = None) -> None:
        self.name = name
        self.work = work
        self.seen = seen or Seen()
        self.reason = reason

    def supports(self, column: Column, facts: Facts) -> str | None:
        return self.reason

    def open(self, capacity: Capacity, allocate: Allocate) -> Loop:
        self.scratch = allocate("scratch", (64, 64), torch.float32).normal_()
        self.capacity = capacity
        return self

    def prepare(self, step: Step) -> None:
        assert step.k.shape[0] == self.capacity.num_pages
        assert step.host_kv_lens == tuple(step.seq_lens.tolist())
        self.seen.lens.append(tuple(step.seq_lens.tolist()))
        self.seen.tables.append(step.page_table.tolist())
        self.seen.pools.append(step.k.data_ptr())
        self.seen.quiet.add((gc.isenabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()))

    def run(self, out: torch.Tensor) -> None:
        for _ in range(self.work):
            torch.mm(self.scratch, self.scratch)
        out.zero_()

    def close(self) -> None:
        self.seen.closed += 1


def timed(
    routes: list[Loop],
    *,
    seed: int = 1,
    settings: RoundSettings = QUICK,
    first_round: int = 0,
    go_on: Any = lambda rounds: True,
) -> list[list[Round]]:
    chunks: list[list[Round]] = []

    def report(rounds: list[Round]) -> bool | Collection[str]:
        chunks.append(rounds)
        answer: bool | Collection[str] = go_on(rounds)
        return answer

    time_cell(
        routes,
        CELL,
        FACTS,
        seed=seed,
        device="cpu",
        make_arena=lambda placement: PlainArena("cpu", placement),
        settings=settings,
        first_round=first_round,
        go_on=report,
    )
    return chunks


def test_rounds_come_in_chunks_with_every_route_and_a_random_order() -> None:
    chunks = timed([Loop("a"), Loop("b"), Loop("c")])
    assert [len(chunk) for chunk in chunks] == [4, 4, 4]
    rounds = [one for chunk in chunks for one in chunk]
    assert [one.index for one in rounds] == list(range(12))
    assert all(set(one.order) == set(one.run_us) == set(one.calls) == {"a", "b", "c"} for one in rounds)
    assert len({one.order for one in rounds}) >= 4
    assert all(one.run_us[name] > 0 and one.host_us == one.run_us for one in rounds for name in one.order)


def test_all_routes_of_a_round_see_the_same_lengths_inside_the_cell() -> None:
    a, b = Seen(), Seen()
    settings = replace(QUICK, min_group_ms=1e-6)  # one call a group
    rounds = [
        one for chunk in timed([Loop("a", seen=a), Loop("b", seen=b)], settings=settings) for one in chunk
    ]
    assert {one.calls["a"] for one in rounds} == {1}
    assert a.lens == b.lens
    assert len(set(a.lens)) > 10  # fresh lengths each round
    for lens in a.lens:
        assert all(CELL.kv_low <= kv_len <= CELL.kv_high for kv_len in lens)
        assert max(lens) >= CELL.kv_high - (CELL.kv_high - CELL.kv_low) // 8


def test_calls_rotate_through_the_pools_across_routes() -> None:
    seen = Seen()
    settings = replace(QUICK, min_group_ms=0.3, chunk=12)
    timed([Loop("a", seen=seen), Loop("b", seen=seen)], settings=settings)
    distinct = list(dict.fromkeys(seen.pools))
    assert len(distinct) == QUICK.operand_sets
    *pools, last, again, once_more = seen.pools
    assert [*pools, last] == [distinct[i % len(distinct)] for i in range(len(pools) + 1)]
    assert last == again == once_more  # outputs are looked at on what was used last


def test_pages_are_permuted_each_round_and_stay_a_partition() -> None:
    seen = Seen()
    timed([Loop("a", seen=seen)], settings=replace(QUICK, min_group_ms=1e-6, operand_sets=1, chunk=12))
    pages = -(-CELL.kv_high // 16)
    assert seen.tables[-1] == seen.tables[-2]  # outputs are looked at on the operands of the last round
    live = [[page for row in table for page in row[:pages]] for table in seen.tables[:-1]]
    assert len({tuple(order) for order in live}) == len(live)
    assert len({tuple(sorted(order)) for order in live}) == 1
    assert len(set(live[0])) == pages * CELL.column.batch_size


def test_a_resume_runs_the_rounds_that_would_have_come() -> None:
    whole, rest = Seen(), Seen()
    settings = replace(QUICK, min_group_ms=1e-6, chunk=12)
    full = [one for chunk in timed([Loop("a", seen=whole), Loop("b")], settings=settings) for one in chunk]
    tail = [
        one
        for chunk in timed([Loop("a", seen=rest), Loop("b")], settings=settings, first_round=7)
        for one in chunk
    ]
    assert [one.index for one in tail] == [7, 8, 9, 10, 11]
    assert [one.order for one in tail] == [one.order for one in full[7:]]
    assert rest.lens[-6:] == whole.lens[-6:]
    other = [one for chunk in timed([Loop("a"), Loop("b")], seed=2, settings=settings) for one in chunk]
    assert [one.order for one in other] != [one.order for one in full]


def test_the_parent_stops_and_narrows() -> None:
    assert len(timed([Loop("a"), Loop("b")], go_on=lambda rounds: False)) == 1
    assert len(timed([Loop("a"), Loop("b")], go_on=lambda rounds: ())) == 1
    chunks = timed([Loop("a"), Loop("b"), Loop("c")], go_on=lambda rounds: {"a", "c"})
    assert set(chunks[0][0].order) == {"a", "b", "c"}
    assert all(set(one.order) == {"a", "c"} for chunk in chunks[1:] for one in chunk)
    with pytest.raises(BenchError, match=r"go on with \['z'\]"):
        timed([Loop("a")], go_on=lambda rounds: {"z"})
    assert timed([Loop("a")], first_round=QUICK.max_rounds) == []


class Scripted(HostClock):
    """A clock that says what a call costs: every third group meets an interruption of 5 ms."""

    def __init__(self, cost_us: dict[str, float], readings: list[Conditions] | None = None) -> None:
        super().__init__()
        self.cost_us = cost_us
        self.groups = 0
        self.is_warm = False
        if readings:
            self.monitor = Readings(readings)

    def stand(self, route: Any, pools: Any, allocate: Any) -> ScriptedStand:
        return ScriptedStand(self, route.name, pools)

    def warm(self) -> bool:
        return self.is_warm


class ScriptedStand:
    def __init__(self, clock: Scripted, name: str, pools: Any) -> None:
        self.clock = clock
        self.name = name
        self.pools = pools

    def measure(self, calls: int) -> GroupTimes:
        self.clock.groups += 1
        late = 5000.0 / calls if self.clock.groups % 3 == 0 else 0.0
        run_us = self.clock.cost_us[self.name] + late
        return GroupTimes(run_us, run_us, 1.0, calls)

    def rerun(self) -> list[Launch]:
        self.pools.latest().out.zero_()
        return [self.pools.latest()]

    def close(self) -> None: ...


class Readings:
    """A monitor that plays back what it was given, the last one for ever."""

    def __init__(self, readings: list[Conditions]) -> None:
        self.readings = readings

    def read(self) -> Conditions:
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]


def test_groups_reach_the_least_length_and_interruptions_do_not_unbalance_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Scripted({"a": 60.0, "b": 60.0, "c": 300.0, "d": 4000.0})
    monkeypatch.setattr(bench_rounds, "clock_for", lambda device: clock)
    settings = replace(QUICK, min_group_ms=1.0, discard_rounds=16)
    rounds = [one for chunk in timed([Loop(name) for name in "abcd"], settings=settings) for one in chunk]
    assert {tuple(sorted(one.calls.items())) for one in rounds} == {
        (("a", 17), ("b", 17), ("c", 4), ("d", 1))
    }
    assert rounds[0].run_us["d"] in (4000.0, 9000.0)


def test_the_start_up_lasts_for_the_rounds_and_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Scripted({"a": 1000.0})
    monkeypatch.setattr(bench_rounds, "clock_for", lambda device: clock)
    timed([Loop("a")], settings=replace(QUICK, discard_rounds=5, max_rounds=1))
    assert clock.groups == 5 + 1
    clock.groups, start = 0, time.perf_counter()
    timed([Loop("a")], settings=replace(QUICK, discard_rounds=1, discard_ms=50.0, max_rounds=1))
    assert clock.groups > 2
    assert time.perf_counter() - start >= 0.05
    clock.groups, clock.is_warm = 0, True
    timed([Loop("a")], settings=replace(QUICK, discard_rounds=2, discard_ms=5000.0, max_rounds=1))
    assert clock.groups == 2 + 1  # a warm device need not wait


def test_a_slow_start_up_ends_after_its_longest_time_but_not_before_four_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(ScriptedStand):
        def measure(self, calls: int) -> GroupTimes:
            time.sleep(0.01)
            return super().measure(calls)

    clock = Scripted({"a": 10_000.0})
    clock.stand = lambda route, pools, allocate: Slow(clock, route.name, pools)  # type: ignore[method-assign]
    monkeypatch.setattr(bench_rounds, "clock_for", lambda device: clock)
    for most_ms, least, most in ((0.0, 4, 4), (75.0, 5, 8), (1000.0, 16, 16)):
        clock.groups = 0
        settings = replace(QUICK, discard_rounds=16, discard_ms=100.0, max_rounds=1, discard_most_ms=most_ms)
        timed([Loop("a")], settings=settings)
        assert least <= clock.groups - 1 <= most


def test_a_slowed_device_drops_the_whole_chunk_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = Conditions(1980, 3201, 60, 500.0, ("sw_power_cap",))
    hot = replace(fine, sm_mhz=1200, reasons=("sw_power_cap", "hw_thermal_slowdown"))
    clock = Scripted({"a": 1000.0}, [fine, fine, hot, fine, fine])
    monkeypatch.setattr(bench_rounds, "clock_for", lambda device: clock)
    chunks = timed([Loop("a")], settings=replace(QUICK, max_rounds=16))
    dropped = [{one.dropped for one in chunk} for chunk in chunks]
    assert dropped == [{""}, {"hw_thermal_slowdown"}, {"hw_thermal_slowdown"}, {""}]
    for chunk in chunks:
        assert [one.conditions is None for one in chunk] == [True, True, True, False]
    seen = chunks[1][-1].conditions
    assert seen is not None
    assert Conditions.from_dict(seen["before"]) == fine
    assert Conditions.from_dict(seen["after"]) == hot


def test_a_round_is_stored_as_before_unless_there_is_more_to_say() -> None:
    plain = Round(3, ("a",), {"a": 1.0}, {"a": 1.0}, {"a": 0.5}, {"a": 2})
    assert set(plain.to_dict()) == {"index", "order", "run_us", "host_us", "prepare_us", "calls"}
    assert Round.from_dict(plain.to_dict()) == plain
    said = replace(plain, conditions={"before": {"sm_mhz": 1}}, dropped="hw_slowdown")
    assert Round.from_dict(json.loads(json.dumps(said.to_dict()))) == said


def test_phases_are_told_in_order() -> None:
    told: list[str] = []
    time_cell(
        [Loop("a"), Loop("b")],
        CELL,
        FACTS,
        seed=1,
        device="cpu",
        make_arena=lambda placement: PlainArena("cpu", placement),
        settings=replace(QUICK, max_rounds=4),
        first_round=0,
        go_on=lambda rounds: True,
        phase=told.append,
    )
    assert told == ["pools", "open a", "open b", "start-up", "rounds", "look", "report", "rounds", "close"]


def test_host_clock_keeps_prepare_apart_from_run() -> None:
    class Sleeper:
        def prepare(self, step: Any) -> None:
            time.sleep(0.004)

        def run(self, out: Any) -> None:
            time.sleep(0.002)

        def close(self) -> None: ...

    nothing: Any = None
    launch = Launch(nothing, nothing)
    times = HostStand(Sleeper(), lambda calls: [launch] * calls, lambda: launch).measure(3)
    assert times.calls == 3
    assert times.run_us == times.host_us >= 2000.0
    assert times.prepare_us >= 4000.0


def test_timing_is_quiet_and_leaves_no_trace() -> None:
    before = (gc.isenabled(), torch.is_inference_mode_enabled(), torch.get_num_threads())
    seen = Seen()
    timed([Loop("a", seen=seen)])
    assert seen.quiet == {(False, True, 1)}
    assert seen.closed == 1
    assert (gc.isenabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()) == before


def test_sessions_are_closed_and_the_collector_is_back_after_an_error() -> None:
    seen = Seen()

    def broken(rounds: list[Round]) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timed([Loop("a", seen=seen)], go_on=broken)
    assert seen.closed == 1
    assert gc.isenabled()


def test_what_cannot_be_timed_is_one_clear_line() -> None:
    with pytest.raises(BenchError, match="b cannot be timed: no fp8"):
        timed([Loop("a"), Loop("b", reason="no fp8")])
    with pytest.raises(BenchError, match="named once each"):
        timed([Loop("a"), Loop("a")])
    with pytest.raises(BenchError, match="no clock for device 'xpu'"):
        time_cell(
            [Loop("a")],
            CELL,
            FACTS,
            seed=0,
            device="xpu",
            make_arena=lambda placement: PlainArena("cpu", placement),
            settings=QUICK,
            first_round=0,
            go_on=lambda rounds: True,
        )


def test_how_many_pools() -> None:
    one = pool_bytes(CELL)
    assert one == 3 * 112 * 32 * 4  # 7 pages of 16 for each of 3 requests, K and V of 16 in fp32
    assert operand_sets(CELL, cache_bytes=5 * one, memory_bytes=100 * one) == 6
    assert operand_sets(CELL, cache_bytes=0, memory_bytes=100 * one) == 4
    assert operand_sets(CELL, cache_bytes=1000 * one, memory_bytes=10**9) == 10
    assert operand_sets(CELL, cache_bytes=1000 * one, memory_bytes=7 * one) == 7
    assert operand_sets(CELL, cache_bytes=1000 * one, memory_bytes=10**9, most=30) == 30
    big = Cell(replace(CELL.column, batch_size=512, max_context=4096), 33, 4096)  # a pool of 256 MiB
    assert operand_sets(big, cache_bytes=10**10, memory_bytes=10**11) == 4
    with pytest.raises(BenchError, match=r"4 KV pools of .* are allowed"):
        operand_sets(CELL, cache_bytes=0, memory_bytes=3 * one)


def test_cache_size_as_linux_reports_it(tmp_path: Path) -> None:
    for index, text in enumerate(("32K", "2M\n", "300M", "")):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(text)
    assert last_level_cache_bytes(tmp_path) == 300 * 2**20
    assert last_level_cache_bytes(tmp_path / "absent") == 0


def test_lengths_of_a_single_request_stay_near_the_top() -> None:
    column = replace(CELL.column, batch_size=1)
    lens = [draw_kv_lens(Cell(column, 2, 130), Random(i))[0] for i in range(300)]
    assert min(lens) >= 114
    assert max(lens) == 130
    assert draw_kv_lens(Cell(column, 8, 8), Random(0)) == (8,)


def test_a_page_cut_short_by_max_context_keeps_its_place() -> None:
    cell = Cell(replace(CELL.column, max_context=100), 33, 100)  # 100 = 6 pages of 16 and a quarter
    with PlainArena("cpu", Placement.TAIL) as arena:
        pools = Pools.build(arena, cell, count=1, seed=4, device="cpu")
        before = pools.sets[0].step.page_table.clone()
        pools.new_round(Random(0))
        after = pools.sets[0].step.page_table
        assert torch.equal(before[:, 6], after[:, 6])
        assert not torch.equal(before[:, :6], after[:, :6])
