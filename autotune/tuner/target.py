"""The machine, engine and study that a run works for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.domain.fingerprint import Facts
    from autotune.space.engine import Engine
    from autotune.space.grid import Grid


@dataclass(frozen=True)
class Target:
    """What every part of a run needs to know.

    Attributes:
        device: torch device string of the child.
        arena_kind: the guarded arena of that device.
        seed: of the study; every operand's seed derives from it.
        others: further engines that call the very same cells: the same rounds must answer for them too.
    """

    grid: Grid
    facts: Facts
    device: str
    arena_kind: str
    seed: int
    others: tuple[Engine, ...] = ()

    def under(self, engine: Engine) -> Target:
        """The same machine and cells under one of the other engines."""
        return replace(self, grid=replace(self.grid, engine=engine), others=())

    @property
    def engine(self) -> Engine:
        """The engine profile."""
        return self.grid.engine

    @property
    def arch(self) -> str:
        """``cpu``, ``sm90`` and the like."""
        return self.grid.architecture

    @property
    def memory_gib(self) -> int | None:
        """Device memory in GiB; None on the CPU, where memory is not the device's own."""
        memory = self.facts.hardware.get("memory_gib")
        return memory if isinstance(memory, int) else None

    @property
    def pad_value(self) -> int:
        """KV length of the engine's padded rows."""
        return self.engine.pad_value
