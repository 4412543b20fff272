"""Where mappings go, against a driver that only keeps books."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from autotune.arena import address_space
from autotune.arena.address_space import GIB, RESERVED, SMALL_HOLE, TIB, WIDE_HOLE, AddressSpace, Mapping
from autotune.arena.base import ArenaError

BASE = 1 << 45
GRANULE = 2 << 20


class Driver:
    """Physical memory of ``room`` bytes; what is mapped where."""

    def __init__(self, room: int = 64 * GIB) -> None:
        self.room = room
        self.mapped: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.handles = itertools.count(1)
        self.created = 0

    def __call__(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def cuMemGetAllocationGranularity(self, *_: Any) -> int:  # noqa: N802
        return GRANULE

    def cuMemAddressReserve(self, *_: Any) -> int:  # noqa: N802
        return BASE

    def cuMemCreate(self, size: int, *_: Any) -> int:  # noqa: N802
        if sum(self.sizes.values()) + size > self.room:
            raise ArenaError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY")
        handle = next(self.handles)
        self.sizes[handle] = size
        self.created += 1
        return handle

    def cuMemRelease(self, handle: int) -> None:  # noqa: N802
        del self.sizes[handle]

    def cuMemMap(self, address: int, size: int, *_: Any) -> None:  # noqa: N802
        for other, length in self.mapped.items():
            # nothing within the small hole of anything else
            assert address + size + SMALL_HOLE <= other or other + length + SMALL_HOLE <= address
        self.mapped[address] = size

    def cuMemSetAccess(self, *_: Any) -> None:  # noqa: N802
        return None

    def cuMemUnmap(self, address: int, size: int) -> None:  # noqa: N802
        assert self.mapped.pop(address) == size


class Anything:
    """Stands for the driver's structures."""

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self) -> Any:
        return Anything()


@pytest.fixture(name="driver")
def _driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(address_space, "call", driver)
    monkeypatch.setattr(address_space, "driver", Anything)
    return driver


def test_one_pool_at_a_time_gets_the_wide_hole(driver: Driver) -> None:
    space = AddressSpace()
    small, pool, second = space.map(100), space.map(5 * GIB, wide=True), space.map(100, wide=True)
    assert (small.size, pool.wide, second.wide) == (GRANULE, True, False)
    assert pool.hole_after == WIDE_HOLE and pool.address + pool.size + WIDE_HOLE < BASE + RESERVED
    assert max(small.address, second.address) + pool.hole_before < pool.address
    space.unmap(pool)
    assert space.map(1, wide=True).wide


def test_addresses_start_over_when_nothing_is_mapped(driver: Driver) -> None:
    space = AddressSpace()
    first = space.map(1)
    second = space.map(1)
    space.unmap(first)
    assert space.map(1).address > second.address  # not used again while something lives
    for mapping in space.live:
        space.unmap(mapping)
    assert space.map(1).address == first.address


def test_a_full_reservation_reuses_the_place_that_is_free_longest(driver: Driver) -> None:
    space = AddressSpace(reserved=TIB)
    held: list[Mapping] = []
    with pytest.raises(ArenaError, match=r"full after \d+ mappings"):
        while True:
            held.append(space.map(GRANULE))
    assert len(held) > 200
    space.unmap(held[7])
    space.unmap(held[3])
    assert space.map(GRANULE).address == held[7].address
    with pytest.raises(ArenaError, match="full"):
        space.map(2 * GRANULE)
    assert space.map(GRANULE).address == held[3].address
    with pytest.raises(ArenaError, match="full"):
        space.map(GRANULE)


def test_physical_memory_is_kept_and_given_back_under_pressure(driver: Driver) -> None:
    space = AddressSpace()
    for _ in range(5):
        space.unmap(space.map(GRANULE))
    assert driver.created == 1
    driver.room = GIB
    space.map(GIB)  # what was kept must go first
    assert list(driver.sizes.values()) == [GIB]
    with pytest.raises(ArenaError, match="OUT_OF_MEMORY"):
        space.map(1)


def test_no_driver_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(ArenaError, match="pip install cuda-bindings"):
        address_space.driver()
