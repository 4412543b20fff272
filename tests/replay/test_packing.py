"""Rounds come back to the last bit, whatever the clock that made them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.bench.record import Round
from autotune.replay.packing import pack, unpack

finite = st.floats(min_value=0.0, max_value=1e12, allow_nan=False)


def round_(index: int, times: dict[str, tuple[float, float, float, int]], dropped: str = "") -> Round:
    run, host, prepare, calls = ({name: four[i] for name, four in times.items()} for i in range(4))
    return Round(index, tuple(times), run, host, prepare, calls, dropped=dropped)  # type: ignore[arg-type]


def same(given: list[Round], back: list[Round]) -> bool:
    """Equal but for the order in a round and the readings."""

    def key(each: Round) -> object:
        return each.index, each.run_us, each.host_us, each.prepare_us, each.calls, each.dropped

    return [key(each) for each in given] == [key(each) for each in back]


@st.composite
def any_rounds(draw: st.DrawFn) -> list[Round]:
    count = draw(st.integers(0, 12))
    found = []
    for i in range(count):
        live = ["base", *draw(st.lists(st.sampled_from("abc"), unique=True))]
        four = st.tuples(finite, finite, finite, st.integers(1, 1000))
        found.append(round_(i, {name: draw(four) for name in live}, draw(st.sampled_from(["", "hot"]))))
    return found


@given(any_rounds())
@settings(max_examples=60, deadline=None)
def test_any_times_come_back(rounds: list[Round]) -> None:
    assert same(rounds, unpack(pack(rounds)))


def test_sums_of_cuda_events_come_back_and_take_few_bytes() -> None:
    rng = np.random.default_rng(1)
    rounds = []
    for i in range(128):
        # what TorchGpu.timed and CudaStand.measure make of two replays of 16 calls
        ticks = 5000 + rng.integers(0, 200, 2)
        total = 1000.0 * sum(float(np.float32(tick * 32e-6)) for tick in ticks)
        nanoseconds = int(rng.integers(60_000, 64_000))
        four = (total / 32, nanoseconds / 1000.0, nanoseconds / 1000.0, 32)
        rounds.append(round_(i, {"fa2": four, "xqa-decode": four}))
    packed = pack(rounds)
    assert same(rounds, unpack(packed))
    # 1 or 2 bytes a value and a short head; eight bytes each would be 6,144
    assert len(packed) < 2500


def test_a_route_that_joins_late_and_one_that_leaves() -> None:
    four = (10.0, 1.5, 2.25, 16)
    rounds = [
        round_(
            i, {"base": four} | ({"late": four} if i >= 3 else {}) | ({"early": four} if i in (0, 2) else {})
        )
        for i in range(6)
    ]
    assert same(rounds, unpack(pack(rounds)))


def test_a_gap_is_refused() -> None:
    with pytest.raises(ValueError, match="without a gap"):
        pack([round_(1, {"base": (1.0, 1.0, 1.0, 1)})])


@pytest.mark.parametrize("cut", [0, 3, 20, -1])
def test_bytes_that_are_cut_off_are_told(cut: int) -> None:
    packed = pack([round_(i, {"base": (math.pi * (i + 1), i / 7, 1.0, 3)}) for i in range(4)])
    with pytest.raises(ValueError, match="cannot be read"):
        unpack(packed[:cut])
