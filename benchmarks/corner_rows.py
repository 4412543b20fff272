"""The rows of ``corners.py``: printed, kept as JSON lines, read again by a run that goes on."""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import IO, TYPE_CHECKING, Any

from autotune.domain.cell import Column
from autotune.domain.verdict import Status
from benchmarks.corner_list import Corner

if TYPE_CHECKING:
    from pathlib import Path

NOT_HERE = "not here"
MOST_DETAIL = 110
_MODULE = re.compile(r"module (\S+) ")
_PREBUILD = "autotune prebuild --gpu"
_PREBUILD_ANYWHERE = (
    f"{_PREBUILD} PROFILE --out DIR where there is a compiler, then autotune prebuild --out DIR "
    "--into FLASHINFER here"
)


@dataclass
class Found:
    """What came of one corner and route.

    Attributes:
        verdict: a status's word, or ``not here``.
        bound: what its errors are held to.
    """

    corner: Corner
    route: str
    verdict: str
    kind: str = ""
    check: str = ""
    detail: str = ""
    worst_error: float | None = None
    bound: float | None = None
    limits: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    checks: int = 0
    launches: int = 0
    repro: str = ""

    def to_dict(self) -> dict[str, object]:
        """JSON-ready values."""
        data = {**vars(self), "corner": self.corner.name, "why": self.corner.why}
        return {**data, "column": self.corner.column.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], corner: Corner) -> Found:
        """A row of :meth:`to_dict`, of ``corner``.

        Raises:
            KeyError, TypeError: it is none.
        """
        values = {each.name: data[each.name] for each in fields(cls) if each.name != "corner"}
        for name in ("limits", "requires"):
            values[name] = tuple(values[name])
        return cls(corner, **values)

    @property
    def key(self) -> tuple[str, str]:
        """Corner and route."""
        return self.corner.name, self.route

    @property
    def settled(self) -> bool:
        """Nothing is left to look at."""
        return self.verdict not in (NOT_HERE, Status.UNPROVEN.value)

    def line(self) -> str:
        """One row of the table."""
        error = (
            "" if self.worst_error is None or not self.bound else f"{self.worst_error:.3g}/{self.bound:.3g}"
        )
        said = "; ".join([*self.requires, *self.limits]) or self.detail
        said = said if len(said) <= MOST_DETAIL else said[: MOST_DETAIL - 3] + "..."
        column = f"{self.corner.name}: {self.corner.column}"
        return (
            f"| {column} | {self.route} | {self.verdict} | {self.kind} | {self.check} | {error} "
            f"| {said.replace('|', '/')} |"
        )


class Report:
    """Prints rows and writes them, each as soon as it is known.

    Args:
        marks: written with each row: what :func:`earlier` goes by.
        before: rows of earlier runs; the settled ones stand.
    """

    def __init__(
        self, stream: IO[str] | None, marks: Mapping[str, str] | None = None, before: Iterable[Found] = ()
    ) -> None:
        self._stream, self._marks = stream, dict(marks or {})
        self.rows: dict[tuple[str, str], Found] = {}
        self._before = {found.key: found for found in before}
        self.unsupported = 0
        for found in self._before.values():
            if found.settled:
                self.rows[found.key] = found
        if self.rows:
            print(f"going on: {len(self.rows)} rows of earlier runs stand", flush=True)
        print("| corner | route | verdict | kind | check | worst error/bound | says |", flush=True)
        print("|---|---|---|---|---|---|---|", flush=True)

    @property
    def counts(self) -> Counter[str]:
        """Rows by verdict."""
        return Counter(found.verdict for found in self.rows.values())

    @property
    def corners(self) -> set[str]:
        """Those of which a route was looked at to the end."""
        return {found.corner.name for found in self.rows.values() if found.settled}

    def stands(self, corner: Corner, route: str) -> bool:
        """Whether an earlier run has settled it."""
        return (corner.name, route) in self.rows

    def add(self, found: Found) -> None:
        """One row."""
        self.rows[found.key] = found
        print(found.line(), flush=True)
        same = self._before.get(found.key) == found  # it is in the file already
        if self._stream is not None and not same:
            self._stream.write(json.dumps({**found.to_dict(), **self._marks}) + "\n")
            self._stream.flush()

    def summary(self, seconds: float) -> None:
        """What is told last."""
        rows = list(self.rows.values())
        for found in rows:
            if found.verdict == Status.UNSAFE.value:
                print(f"\nunsafe: {found.route} in {found.corner.name}: {found.kind}: {found.detail}")
                print(f"  {found.repro}")
        print(f"\n{self.unsupported} pairs of a corner and a route that does not support it are left out")
        for line in (*wanting(rows), *unfinished(rows)):
            print(line)
        said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(self.counts.items()))
        print(f"{len(self.corners)} corners tried, {len(rows)} rows in {seconds:.0f} s: {said or 'none'}")


def wanting(rows: Iterable[Found]) -> list[str]:
    """What is not here: each module with its rows, and the commands that build all of them."""
    absent = [found for found in rows if found.verdict == NOT_HERE]
    if not absent:
        return []
    modules = Counter(
        match[1] if (match := _MODULE.match(found.detail)) else found.detail for found in absent
    )
    each = ", ".join(f"{count} x {name}" for name, count in modules.most_common())
    shown = next((found.detail for found in absent if _PREBUILD in found.detail), _PREBUILD_ANYWHERE)
    # a space's own modules are there; these are of columns that no space has
    commands = shown[shown.index(_PREBUILD) :].replace(" --out", " --columns columns.json --out", 1)
    return [
        f"not here, {len(absent)} rows for want of {len(modules)} modules: {each}",
        f"to build them: python benchmarks/corners.py --list-columns > columns.json, then {commands}",
    ]


def unfinished(rows: Iterable[Found]) -> list[str]:
    """Which corners are complete, and which are not."""
    left: dict[str, int] = {}
    known: set[str] = set()
    for found in rows:
        known.add(found.corner.name)
        if found.verdict == Status.UNPROVEN.value:
            left[found.corner.name] = left.get(found.corner.name, 0) + 1
    if not left:
        return []
    each = ", ".join(f"{name} ({count})" for name, count in left.items())
    return [
        f"{len(known) - len(left)} corners complete, {len(left)} open: {each}; "
        "the same command with the same --out goes on with them"
    ]


def earlier(path: Path, corners: Iterable[Corner], marks: Mapping[str, str]) -> list[Found]:
    """The last row of each corner and route in ``path``, of columns as they are now, of the same ``marks``.

    A line that is no row (a run was killed while it wrote) is passed over.
    """
    found: dict[tuple[str, str], Found] = {}
    known = {corner.name: corner for corner in corners}
    for line in path.read_text(errors="replace").splitlines():
        try:
            data = json.loads(line)
            corner = known[data["corner"]]
            if Column.from_dict(data["column"]) != corner.column:
                continue
            if all(data.get(name) == value for name, value in marks.items()):
                row = Found.from_dict(data, corner)
                found[row.key] = row
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return list(found.values())
