"""The guarded mappings that are live in this process, so that a fault's address can be given a name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """One operand and the address space reserved round it, as half-open address ranges.

    ``reserved_start .. reserved_end`` is ours; ``body_start .. body_end`` of it is accessible (whole memory
    pages); ``start .. end`` of that is the operand.
    """

    name: str
    reserved_start: int
    body_start: int
    start: int
    end: int
    body_end: int
    reserved_end: int

    @property
    def hole_bytes(self) -> tuple[int, int]:
        """Inaccessible bytes before and after the accessible ones."""
        return self.body_start - self.reserved_start, self.reserved_end - self.body_end


@dataclass(frozen=True, slots=True)
class FaultSite:
    """An address inside one of our holes.

    ``offset`` counts from the operand: 0 is the first byte past its end, -1 the last byte before its start.
    """

    operand: str
    offset: int

    def __str__(self) -> str:
        if self.offset >= 0:
            return f"{self.operand}: {self.offset} bytes past the end"
        return f"{self.operand}: {-self.offset} bytes before the start"


_live: dict[int, Region] = {}


def register(region: Region) -> None:
    """Give the addresses of ``region`` its name."""
    _live[region.reserved_start] = region


def forget(region: Region) -> None:
    """The region is about to be unmapped."""
    _live.pop(region.reserved_start, None)


def reserved_bytes() -> int:
    """Address space that all live regions take."""
    return sum(region.reserved_end - region.reserved_start for region in _live.values())


def describe(address: int) -> FaultSite | None:
    """The hole that ``address`` lies in; None outside every hole (inside an operand, too)."""
    for region in list(_live.values()):
        if region.reserved_start <= address < region.body_start:
            return FaultSite(region.name, address - region.start)
        if region.body_end <= address < region.reserved_end:
            return FaultSite(region.name, address - region.end)
    return None
