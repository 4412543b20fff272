"""What compute-sanitizer says about one invalid access."""

from __future__ import annotations

from dataclasses import dataclass

# A CUTLASS kernel's name can fill a page; what tells it apart comes first.
MOST_NAME = 120


@dataclass(frozen=True, slots=True)
class Nearest:
    """The allocation nearest to the address.

    Attributes:
        side: ``after``, ``before`` or ``inside``.
        distance: bytes as the tool counts: 1 is the first byte after the allocation's end, or the last
            before its start. 0 inside.
        size: bytes of the allocation.
    """

    side: str
    distance: int
    size: int

    def __str__(self) -> str:
        where = "inside" if self.side == "inside" else f"{_count(self.distance, 'byte')} {self.side}"
        return f"{where} an allocation of {_count(self.size, 'byte')}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One access that memcheck reports.

    Attributes:
        kernel: demangled name, without its parameters; "" where the report names none.
        access: ``read``, ``write`` or ``atomic``.
        space: ``global``, ``shared`` or ``local``.
        size: bytes of the access.
        address: the one accessed; None where the report has none.
        misaligned: the address is not a multiple of what the access needs; otherwise it lies outside.
        nearest: None where the report names no allocation.
        thread, block: indices as printed, such as ``"0,0,0"``; "" where there are none.
    """

    kernel: str
    access: str
    space: str
    size: int
    address: int | None = None
    misaligned: bool = False
    nearest: Nearest | None = None
    thread: str = ""
    block: str = ""

    def __str__(self) -> str:
        what = "misaligned" if self.misaligned else "invalid"
        parts = [f"{what} {self.space} {self.access} of {_count(self.size, 'byte')}"]
        if self.address is not None:
            parts[0] += f" at {self.address:#x}"
        if self.nearest is not None:
            parts.append(str(self.nearest))
        if self.kernel:
            parts.append(f"in {_shortened(self.kernel)}")
        if self.thread and self.block:
            parts.append(f"thread ({self.thread}) of block ({self.block})")
        return ", ".join(parts)


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}" if number == 1 else f"{number:,} {unit}s"


def _shortened(name: str) -> str:
    return name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 3]}..."
