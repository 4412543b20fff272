"""Guarded host memory: what is flush with what, which bytes are watched, what is unmapped when."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.arena import regions
from autotune.arena.base import ArenaError, Placement
from autotune.arena.host_mmap import GIB, HOLE_BYTES, POOL_HOLE_BYTES, RESERVE_LIMIT, HostMmapArena

PAGE = mmap.PAGESIZE
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32]


def mapped(address: int) -> str | None:
    """Permissions of the mapping that contains ``address``, as the kernel lists them."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end:
            return permissions
    return None


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    placement=st.sampled_from(Placement),
    slack=st.sampled_from([0, 1, 4, 100, 512, 5000]),
    align=st.sampled_from([None, 1, 16, 256]),
)
@settings(max_examples=60, deadline=None)
def test_the_flush_end_touches_the_hole(
    shape: tuple[int, ...], dtype: torch.dtype, placement: Placement, slack: int, align: int | None
) -> None:
    with HostMmapArena(placement, slack) as arena:
        tensor = arena.tensor("x", shape, dtype, align=align)
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        start = tensor.data_ptr()
        end = start + tensor.numel() * dtype.itemsize
        unit = align or dtype.itemsize
        assert start % unit == 0
        if placement is Placement.TAIL:
            gap = -end % PAGE if slack < PAGE else (-(end + slack) % PAGE) + slack
            hole = end + gap
        else:
            gap = start % PAGE if slack < PAGE else (start - slack) % PAGE + slack
            hole = start - gap - 1
        assert slack <= gap < slack + unit
        assert mapped(hole) == "---p"
        assert mapped(start) == mapped(end - 1) == "rw-p"
        tensor.zero_()
        assert arena.overwritten() == []


def test_default_alignment_leaves_no_slack() -> None:
    for placement in Placement:
        with HostMmapArena(placement) as arena:
            tensor = arena.tensor("x", (3, 5), torch.bfloat16)
            edge = tensor.data_ptr() + (30 if placement is Placement.TAIL else 0)
            assert edge % PAGE == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_was_never_written_reads_as_nan(dtype: torch.dtype) -> None:
    with HostMmapArena() as arena:
        assert arena.tensor("out", (1001,), dtype).isnan().all()


def test_padding_is_hostile_as_a_page_number_and_as_e4m3() -> None:
    with HostMmapArena() as arena:
        assert (arena.tensor("page_table", (7,), torch.int32) < -1000).all()
        assert arena.tensor("kv_cache", (64,), torch.float8_e4m3fn).float().isnan().any()


@pytest.mark.parametrize(
    ("placement", "slack", "offset", "value", "told"),
    [
        (Placement.TAIL, 64, 0, b"\x00", "out: 1 bytes after the end, from offset 0"),
        (Placement.TAIL, 64, 60, b"\x01\x02\x03\x04", "out: 4 bytes after the end, from offset 60"),
        (Placement.TAIL, 0, -44, b"\x00" * 4, "out: 4 bytes before the start, from offset -4"),
        (Placement.HEAD, 0, 0, b"\xff" * 8, "out: 4 bytes after the end, from offset 0"),
        (Placement.HEAD, 64, -104, b"\x00" * 8, "out: 8 bytes before the start, from offset -64"),
    ],
)
def test_a_changed_canary_is_named(
    placement: Placement, slack: int, offset: int, value: bytes, told: str
) -> None:
    with HostMmapArena(placement, slack) as arena:
        arena.tensor("q", (10,), torch.float32).zero_()
        out = arena.tensor("out", (10,), torch.float32).zero_()
        assert arena.overwritten() == []
        ctypes.memmove(out.data_ptr() + 40 + offset, value, len(value))
        assert arena.overwritten() == [told]


def test_writes_on_both_sides_of_two_operands_are_all_told() -> None:
    with HostMmapArena(slack=32) as arena:
        for name in ("a", "b"):
            address = arena.tensor(name, (4,), torch.int32).data_ptr()
            ctypes.memset(address - 2, 0, 2)
            ctypes.memset(address + 16, 0, 3)
        assert arena.overwritten() == [
            "a: 2 bytes before the start, from offset -2",
            "a: 3 bytes after the end, from offset 0",
            "b: 2 bytes before the start, from offset -2",
            "b: 3 bytes after the end, from offset 0",
        ]


def test_ordinary_operands_get_a_gibibyte_and_the_pool_what_a_page_number_reaches() -> None:
    with HostMmapArena() as arena:
        q = arena.tensor("q", (4,), torch.float32)
        pool = arena.tensor("kv_cache", (2, 4, 16, 1, 128), torch.float32)
        assert arena.holes() == {"q": (HOLE_BYTES, HOLE_BYTES), "kv_cache": POOL_HOLE_BYTES}
        assert mapped(q.data_ptr() - GIB // 2) == "---p"
        # the largest int32 page number of an 8 KiB page
        wild = pool.data_ptr() + (2**31 - 1) * 16 * 128 * 4
        assert mapped(wild) == "---p"
        assert str(regions.describe(wild)).startswith("kv_cache: ")


def test_pool_holes_shrink_where_address_space_runs_out() -> None:
    arenas = [HostMmapArena() for _ in range(12)]
    try:
        widths = []
        for arena in arenas:
            arena.tensor("kv_cache", (4,), torch.float32)
            widths.append(arena.holes()["kv_cache"][1])
        assert widths[0] == POOL_HOLE_BYTES[1]
        assert widths == sorted(widths, reverse=True) and HOLE_BYTES <= widths[-1] < widths[0]
        assert regions.reserved_bytes() <= RESERVE_LIMIT + 12 * GIB * 3
    finally:
        for arena in arenas:
            arena.close()
    assert regions.reserved_bytes() == 0


def test_leaving_unmaps_and_closes() -> None:
    arena = HostMmapArena()
    with arena:
        tensor = arena.tensor("x", (8,), torch.float32)
        address = tensor.data_ptr()
        assert mapped(address) == "rw-p"
    assert mapped(address) is None
    assert regions.describe(address + 4096) is None
    with pytest.raises(ArenaError, match="x: the arena was left"):
        arena.tensor("x", (8,), torch.float32)
    arena.close()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)])
def test_tensors_without_elements(shape: tuple[int, ...]) -> None:
    with HostMmapArena() as arena:
        tensor = arena.tensor("empty", shape, torch.float32)
        assert tensor.shape == shape and tensor.sum() == 0
        assert arena.holes() == {} and arena.overwritten() == []


def test_a_scalar_has_one_element() -> None:
    with HostMmapArena() as arena:
        assert arena.tensor("scale", (), torch.float32).fill_(3.0).item() == 3.0


def test_memory_that_cannot_be_had_is_an_arena_error() -> None:
    with HostMmapArena() as arena:
        with pytest.raises(ArenaError, match=r"pool: .* addresses cannot be had"):
            arena.tensor("pool", (1 << 47,), torch.uint8)
        assert arena.tensor("q", (2,), torch.float32).numel() == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slack": -1}, "slack must not be negative"),
        ({"hole_bytes": 100}, "at least one memory page"),
        ({"pool_hole_bytes": (0, GIB)}, "at least one memory page"),
    ],
)
def test_senseless_arenas_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostMmapArena(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("align", [0, 3, 8192])
def test_senseless_alignment_is_refused(align: int) -> None:
    with HostMmapArena() as arena, pytest.raises(ValueError, match="x: align must be a power of two"):
        arena.tensor("x", (4,), torch.float32, align=align)
