"""Containment, never nearest; and nothing a caller passes may raise."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import KvLayout, Shape
from autotune.domain.verdict import Requirement
from autotune.router import Bound, Router
from autotune.router.status import ACTIVE, RouterStatus
from autotune.table.build import DecidedCell
from autotune.table.dump import dump_table
from autotune.table.load import load_table
from autotune.table.model import RoutingTable
from tests.table import samples
from tests.table.samples import DTYPES, FALLBACK, FASTER, SHAPE, SPLIT, decided

ALL = (4, 4096)


def router_of(table: RoutingTable) -> Router:
    """As ``Router.load`` makes it, without the file."""
    loaded = load_table(dump_table(table))
    return Router(loaded, RouterStatus(ACTIVE, "", "", loaded.digest), "fallback")


def bound_of(cells: Sequence[DecidedCell], max_context: int = 4096, attests: Any = ()) -> Bound:
    return router_of(samples.table_of(cells)).bind(SHAPE, DTYPES, max_context=max_context, attests=attests)


SAMPLE = bound_of(samples.sample_cells())


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ((2, 4, 4), "proven_faster"),
        ((2, 4, 1024), "proven_faster"),
        ((2, 4, 4096), "proven_faster"),
        ((2, 4, None), "proven_faster"),
        ((3, 4, 4), "proven_faster"),
        ((3, 4, None), "proven_faster"),
        ((1, 4, 1025), "proven_faster"),
        ((5, 4, 1025), "proven_faster"),
        ((1, 4, 1024), "not_faster"),
        ((1, 4, None), "not_faster"),
        ((5, 4, 1024), "candidate_unsafe"),
        ((5, 4, None), "candidate_unsafe"),
        ((2, 4, 3), "kv_len_not_proven"),
        ((2, 4, 0), "kv_len_not_proven"),
        ((2, 4, -1), "kv_len_not_proven"),
        ((2, 4, 4097), "kv_len_not_proven"),
        ((2, 4, 10**400), "kv_len_not_proven"),
        ((0, 4, 100), "batch_size_not_proven"),
        ((-2, 4, 100), "batch_size_not_proven"),
        ((9, 4, 100), "batch_size_not_proven"),
        ((10**400, 4, 100), "batch_size_not_proven"),
        ((2, 3, 100), "q_len_not_in_table"),
        ((2, 5, 100), "q_len_not_in_table"),
        ((2, -4, 100), "q_len_not_in_table"),
        ((2, 10**400, 100), "q_len_not_in_table"),
    ],
)
def test_containment(call: tuple[int, int, int | None], why: str) -> None:
    expected = SPLIT if why == "proven_faster" else FALLBACK
    assert SAMPLE.route(*call) == expected
    assert SAMPLE.use_decode(*call) is (expected == SPLIT)
    assert SAMPLE.proven(*call) == (SPLIT if expected == SPLIT else None)
    found = SAMPLE.explain(*call)
    assert (found.answer, found.why, found.proven) == (expected, why, expected == SPLIT)
    assert found.detail


class Evil(int):
    """A Python integer by inheritance that fights back."""

    def __hash__(self) -> int:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __int__(self) -> int:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


class Liar:
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError


class Tensorlike:
    def __index__(self) -> int:
        raise AssertionError("reading a tensor synchronises the device")

    __int__ = __index__


Integral.register(Evil)

# By name: pytest itself would look at some of these.
ODD: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "text": "2",
    "bytes": b"2",
    "float": 2.0,
    "nan": float("nan"),
    "infinity": float("inf"),
    "complex": 2j,
    "list": [],
    "dict": {},
    "tuple": (),
    "object": object(),
    "class": int,
    "evil": Evil(2),
    "liar": Liar(),
    "tensorlike": Tensorlike(),
    "numpy truth": np.True_,
    "numpy float": np.float32(2),
    "numpy array": np.array([2, 4]),
    "tensor": torch.tensor(2),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments_get_the_fallback(name: str) -> None:
    odd = ODD[name]
    for call in ((odd, 4, 100), (2, odd, 100), (odd, odd, odd)):
        assert SAMPLE.route(*call) == FALLBACK
        assert SAMPLE.use_decode(*call) is False
        assert SAMPLE.explain(*call).why == "bad_input"
    if odd is not None:
        assert SAMPLE.route(2, 4, odd) == FALLBACK
        assert SAMPLE.explain(2, 4, odd).why == "bad_input"


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64])
def test_numpy_integers_are_integers(kind: Any) -> None:
    assert SAMPLE.route(kind(2), kind(4), kind(100)) == SPLIT
    assert SAMPLE.route(kind(3), 4) == SPLIT
    assert SAMPLE.route(kind(9), 4) == FALLBACK


def test_keywords_work() -> None:
    assert SAMPLE.route(batch_size=2, q_len=4, max_kv_len=100) == SPLIT
    assert SAMPLE.use_decode(batch_size=2, q_len=4) is True


def test_max_context() -> None:
    def whole(max_context: int) -> Bound:
        return bound_of(samples.sample_cells(), max_context)

    assert whole(4096).route(2, 4, 4096) == SPLIT
    assert whole(2000).route(2, 4, 2000) == SPLIT
    assert whole(2000).route(2, 4, 2001) == FALLBACK  # longer than the engine says it can be
    assert whole(1024).route(2, 4, 1024) == SPLIT
    assert whole(1024).route(2, 4, 1025) == FALLBACK
    assert whole(4097).route(2, 4, 100) == FALLBACK
    assert whole(4097).explain(2, 4, 100).why == "max_context_not_proven"
    odd: list[Any] = [0, -1, True, None, "4096", 4096.0, torch.tensor(4096)]
    for value in odd:
        bound = whole(value)
        assert (bound.route(2, 4, 100), bound.explain(2, 4, 100).why) == ("fallback", "bad_input")
    assert whole(np.int64(4096)).route(2, 4, 100) == SPLIT


def test_an_engine_that_pads_otherwise_gets_the_fallback() -> None:
    router = router_of(samples.sample())

    def bound(pad_value: Any) -> Bound:
        return router.bind(SHAPE, DTYPES, max_context=4096, pad_value=pad_value)

    for same in (None, 1, np.int32(1)):
        assert bound(same).route(2, 4, 100) == SPLIT
    for other in (0, 2):
        assert bound(other).route(2, 4, 100) == FALLBACK
        found = router.explain(SHAPE, DTYPES, 4096, 2, 4, 100, pad_value=other)
        assert (found.answer, found.why) == (FALLBACK, "pad_value_not_proven")
        assert f"padded rows of length {other}; proven is 1" in found.detail
    for odd in (True, -1, "1", 1.0, torch.tensor(1)):
        assert bound(odd).explain(2, 4, 100).why == "bad_input"


def test_the_least_proven_max_context_that_holds_the_engines() -> None:
    cells = [decided(1, (4, 1024), FASTER, max_context=1024), decided(1, ALL, samples.SLOWER)]
    assert bound_of(cells, 1024).route(1, 4, 100) == SPLIT
    assert bound_of(cells, 1025).route(1, 4, 100) == FALLBACK
    assert bound_of(cells, 1000).route(1, 4, 100) == SPLIT


def test_shape_and_dtypes_must_be_exact() -> None:
    router = router_of(samples.sample())

    def answer(shape: Any, dtypes: Any) -> str:
        return router.bind(shape, dtypes, max_context=4096).route(2, 4, 100)

    assert answer(SHAPE, DTYPES) == SPLIT
    assert answer(SHAPE.to_dict(), DTYPES.to_dict()) == SPLIT
    assert answer(Shape(8, 1, 128, 16, kv_layout=KvLayout.FUSED_NHD), DTYPES) == SPLIT
    changes = {
        "num_qo_heads": 16,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 32,
        "head_dim_vo": 64,
        "kv_layout": "fused-hnd",
        "window_left": 128,
        "sinks": True,
        "soft_cap": 30.0,
    }
    assert {*changes, "mask"} == set(SHAPE.to_dict())
    for key, value in changes.items():
        assert answer({**SHAPE.to_dict(), key: value}, DTYPES) == "fallback", key
    for profile in ("fp32", "fp8", "nvfp4"):
        assert answer(SHAPE, PROFILES[profile]) == "fallback"
    for shape in (None, {}, {"num_qo_heads": 8}, 3, "x", {**SHAPE.to_dict(), "extra": 1}, {1: 2}, [SHAPE]):
        assert answer(shape, DTYPES) == "fallback"
    odd: list[Any] = [None, {}, {"q": []}, "bf16", {"q": "bf16", "kv": "bf16", "out": "int3"}]
    for dtypes in odd:
        assert answer(SHAPE, dtypes) == "fallback"
    assert router.explain(SHAPE, PROFILES["fp8"], 4096, 2, 4).why == "shape_not_in_table"
    assert router.explain(None, DTYPES, 4096, 2, 4).why == "bad_input"  # type: ignore[arg-type]


def test_requirements_must_all_be_attested() -> None:
    both = [decided(1, ALL, FASTER, requires=("finite_pool", "tail_padding_512"))]
    attested: list[Any] = [(), "finite_pool", ["finite_pool"], {"tail_padding_512"}, None, {"other"}]
    for attests in attested:
        bound = bound_of(both, attests=attests)
        assert bound.route(1, 4) == FALLBACK
        assert bound.use_decode(1, 4) is False
        found = bound.explain(1, 4, 100)
        assert found.why == "requires_not_attested"
        assert found.proof is not None
    for attests in (
        {"finite_pool", "tail_padding_512"},
        [Requirement.FINITE_POOL, Requirement.TAIL_PADDING_512],
        frozenset({"finite_pool", "tail_padding_512", "more"}),
    ):
        assert bound_of(both, attests=attests).route(1, 4) == SPLIT
    assert bound_of([decided(1, ALL, FASTER)]).route(1, 4) == SPLIT
    one = [decided(1, ALL, FASTER, requires=("finite_pool",))]
    assert bound_of(one, attests="finite_pool").route(1, 4) == SPLIT
    odd: list[Any] = [3, [[]], [{}]]
    for attests in odd:
        assert bound_of(one, attests=attests).route(1, 4) == "fallback"


def test_a_context_route_is_proven_but_is_not_decode() -> None:
    table = samples.table_of([decided(1, ALL, FASTER)])
    changed = samples.edited(dump_table(table), f'"{SPLIT}": "decode"', f'"{SPLIT}": "context"')
    bound = router_of(load_table(changed)).bind(SHAPE, DTYPES, max_context=4096)
    assert (bound.route(1, 4), bound.proven(1, 4), bound.use_decode(1, 4)) == (SPLIT, SPLIT, False)


def test_a_decode_kernel_as_the_callers_fallback_is_never_called_proven(tmp_path: Path) -> None:
    table = load_table(dump_table(samples.sample()))
    router = Router(table, RouterStatus(ACTIVE, "", "", table.digest), SPLIT)
    bound = router.bind(samples.OTHER_SHAPE, DTYPES, max_context=4096)
    assert (bound.route(2, 4), bound.use_decode(2, 4), bound.proven(2, 4)) == (SPLIT, False, None)


def test_two_fallbacks_for_one_shape() -> None:
    cells = [decided(1, ALL, FASTER), decided(9, ALL, samples.SLOWER, fallback="torch-eager")]
    bound = bound_of(cells)
    assert bound.route(1, 4) == SPLIT
    assert bound.route(9, 4) == "torch-eager"
    assert bound.route(5, 4) == "fallback"  # neither is known to hold there


def test_explain_shows_the_bound_and_the_proof() -> None:
    router = router_of(samples.sample())
    found = router.explain(SHAPE, DTYPES, 4096, 2, 4, 100)
    assert (found.answer, found.speedup_low, found.vs_stock) == (SPLIT, 1.1234, 1.2)
    assert found.proof is not None
    assert (found.proof.checks, found.proof.launches, found.proof.worst_error) == (9, 600, 0.004)
    assert router.explain(SHAPE, DTYPES, 4096, 2, 4).speedup_low is None  # no one row, no one bound
    miss = router.explain(SHAPE, DTYPES, 4096, 77, 4, 100)
    assert miss.why == "batch_size_not_proven"
    assert "batch_size 77" in miss.detail


def covered(cells: Sequence[DecidedCell], route: str, batch: int, q_len: int, low: int, high: int) -> bool:
    """Whether decided cells prove ``route`` for this batch over all of ``low .. high``."""

    def proven(size: int, interval: tuple[int, int] | None) -> bool:
        kv = low
        mine = [c for c in cells if (c.cell.column.batch_size, c.cell.column.interval) == (size, interval)]
        for cell in sorted(mine, key=lambda c: c.cell.kv_low):
            if cell.cell.kv_low <= kv <= cell.cell.kv_high and cell.decision.route == route:
                kv = cell.cell.kv_high + 1
        return kv > high

    cells = [c for c in cells if c.cell.column.q_len == q_len]
    if any(c.cell.column.batch_size == batch and c.cell.column.interval is None for c in cells):
        return proven(batch, None)
    for interval in {c.cell.column.interval for c in cells if c.cell.column.interval}:
        if interval[0] < batch < interval[1]:
            samples_inside = {c.cell.column.batch_size for c in cells if c.cell.column.interval == interval}
            return all(proven(end, None) for end in interval) and all(
                proven(size, interval) for size in samples_inside
            )
    return False


@given(
    samples.cell_lists(),
    st.lists(
        st.tuples(
            st.sampled_from((SHAPE, samples.OTHER_SHAPE)),
            st.sampled_from((1, 300, 301, 2000, 4096, 4097)),
            st.integers(-1, 18),
            st.sampled_from((0, 1, 4, 5)),
            st.none() | st.integers(-2, 5000),
            st.booleans(),
        ),
        min_size=30,
        max_size=60,
    ),
)
@settings(max_examples=80, deadline=None)
def test_an_answer_other_than_the_fallback_lies_in_a_proven_cell(
    cells: list[DecidedCell], queries: list[tuple[Shape, int, int, int, int | None, bool]]
) -> None:
    router = router_of(samples.table_of(cells))
    for shape, max_context, batch, q_len, kv, attested in queries:
        attests = {"finite_pool"} if attested else set()
        bound = router.bind(shape, DTYPES, max_context=max_context, attests=attests)
        answer = bound.route(batch, q_len, kv)
        found = router.explain(shape, DTYPES, max_context, batch, q_len, kv, attests)
        assert found.answer == answer
        assert found.use_decode is bound.use_decode(batch, q_len, kv)
        if bound.proven(batch, q_len, kv) is None:
            assert answer in (FALLBACK, "fallback")
            continue
        mine = [c for c in cells if c.cell.column.shape == shape and c.cell.column.q_len == q_len]
        (proven_context,) = {c.cell.column.max_context for c in mine}
        assert max_context <= proven_context
        low, high = (q_len, max_context) if kv is None else (kv, kv)
        assert covered(mine, answer, batch, q_len, low, high)
        needed = {
            need for c in mine if c.verdict for need in c.verdict.requires if c.decision.route == answer
        }
        assert needed <= attests


@given(samples.cell_lists())
@settings(max_examples=30, deadline=None)
def test_every_proven_captured_cell_is_routed(cells: list[DecidedCell]) -> None:
    """The other direction: containment is not bought by answering the fallback everywhere."""
    router = router_of(samples.table_of(cells))
    for cell in cells:
        column = cell.cell.column
        if cell.decision.route and column.interval is None:
            bound = router.bind(
                column.shape, column.dtypes, max_context=column.max_context, attests=["finite_pool"]
            )
            for kv in (cell.cell.kv_low, cell.cell.kv_high):
                assert bound.route(column.batch_size, column.q_len, kv) == cell.decision.route


def test_look_ups_allocate_nothing() -> None:
    calls = [(2, 4, 100), (3, 4, 2000), (1, 4, None), (99, 4, 100), (2, 7, 100), (2, 4, 9999)]
    route, use_decode = SAMPLE.route, SAMPLE.use_decode

    def many(times: int) -> None:
        for _ in range(times):
            for batch_size, q_len, max_kv_len in calls:
                route(batch_size, q_len, max_kv_len)
                use_decode(batch_size, q_len, max_kv_len)

    many(10)
    measured = []
    tracemalloc.start()
    try:
        many(10)
        # the least of several: other threads allocate now and then, what is ours comes each time
        for _ in range(5):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            many(2000)
            after, peak = tracemalloc.get_traced_memory()
            measured.append((after - before, peak - before))
    finally:
        tracemalloc.stop()
    assert min(kept for kept, _ in measured) <= 64
    assert min(peak for _, peak in measured) < 1024  # nothing piles up in between either


def test_a_mapping_attests_nothing() -> None:
    one = [decided(1, ALL, FASTER, requires=("finite_pool",))]
    mappings: list[Any] = [{"finite_pool": False}, {"finite_pool": True}, {}]
    for attests in mappings:
        found = bound_of(one, attests=attests).explain(1, 4, 100)
        assert (found.answer, found.why) == ("fallback", "bad_input")
        assert "attests" in found.detail
