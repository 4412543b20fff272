"""The operands that a cell's rounds rotate through, and what changes in them from round to round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import torch

from autotune.arena.operands import Operands, Recipe, build, capacity_of, pages_of, twin
from autotune.bench.clock import BenchError, Launch
from autotune.hardware.memory import kv_pool_bytes

if TYPE_CHECKING:
    from autotune.arena.base import Arena
    from autotune.domain.cell import Cell
    from autotune.routes.base import Capacity

# Fewer than this and a call could find its own pool in the cache of the call before.
LEAST_SETS = 4
# Enough to leave a core's own cache with all but the smallest pools.
MOST_SETS = 10
# Filling pools costs about 2 ms a MiB on one core: past this, rotating more of them is not worth the wait.
WORTH_BYTES = 128 * 2**20


def pool_bytes(cell: Cell) -> int:
    """Bytes of one KV pool that holds every request of ``cell`` at ``kv_high``."""
    return kv_pool_bytes(cell.column, cell.kv_high)


def operand_sets(cell: Cell, *, cache_bytes: int, memory_bytes: int, most: int = MOST_SETS) -> int:
    """How many pools to rotate: past the last-level cache where that is affordable, never fewer than 4.

    Args:
        cache_bytes: what all pools together should exceed; 0 if unknown.
        memory_bytes: what all pools together may take.
        most: sets beyond which more are not worth building.

    Raises:
        BenchError: not even 4 pools fit into ``memory_bytes``.
    """
    one = pool_bytes(cell)
    if LEAST_SETS * one > memory_bytes:
        raise BenchError(
            f"{LEAST_SETS} KV pools of {cell} take {LEAST_SETS * one / 2**30:.1f} GiB, "
            f"{memory_bytes / 2**30:.1f} GiB are allowed"
        )
    affordable = min(most, min(memory_bytes, WORTH_BYTES) // one)
    return max(LEAST_SETS, min(cache_bytes // one + 1, affordable))


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of this machine's last-level CPU cache as Linux reports it; 0 where it does not."""
    sizes = []
    for entry in folder.glob("index*/size"):
        text = entry.read_text().strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdigit():
            sizes.append(int(digits) * unit)
    return max(sizes, default=0)


def draw_kv_lens(cell: Cell, rng: Random) -> tuple[int, ...]:
    """Ragged total lengths of one round: inside the cell's interval, the longest in its top eighth."""
    span = cell.kv_high - cell.kv_low
    lens = [rng.randint(cell.kv_low, cell.kv_high) for _ in range(cell.column.batch_size)]
    lens[rng.randrange(len(lens))] = rng.randint(cell.kv_high - span // 8, cell.kv_high)
    return tuple(lens)


@dataclass(slots=True)
class Pools:
    """Several operand sets of one cell, alike in size, so that one session serves them all.

    Every row is built as long as ``kv_high`` (to the page's end), so that any shorter length and any
    permutation of the pages reads ordinary values. All sets have the same lengths at any time: whichever a
    call gets, it has the same work to do. With ``shared`` they also have one page table: a captured graph
    that launches on all of them reads it from one place.
    """

    cell: Cell
    capacity: Capacity
    sets: list[Launch]
    full_pages: int
    shared: bool = False
    _next: int = 0

    @classmethod
    def build(
        cls,
        arena: Arena,
        cell: Cell,
        *,
        count: int,
        seed: int,
        device: str,
        shared: bool = False,
        interleaved_v_scales: bool = False,
    ) -> Pools:
        """Build ``count`` sets in ``arena``.

        Args:
            interleaved_v_scales: see :class:`autotune.arena.operands.Recipe`.

        Raises:
            ArenaError: memory could not be mapped.
        """
        column = cell.column
        page = column.shape.page_size
        longest = min(pages_of(cell.kv_high, page) * page, column.max_context)
        kv_lens = (longest,) * column.batch_size

        def drawn(index: int) -> Operands:
            recipe = Recipe(
                kv_lens=kv_lens,
                seed=Random(f"{seed}:pool:{index}").getrandbits(63),
                interleaved_v_scales=interleaved_v_scales,
            )
            return build(arena, column, recipe, device)

        first = drawn(0)
        # shared sets hold the same values: copying takes a fraction of the time of drawing them
        others = [twin(arena, first) if shared else drawn(index) for index in range(1, count)]
        sets = [Launch(operands.step, operands.out) for operands in (first, *others)]
        # a page that max_context cuts short keeps its place: its tail does not hold ordinary values
        return cls(cell, capacity_of(column, first.recipe, device), sets, longest // page, shared)

    def new_round(self, rng: Random) -> None:
        """Draw lengths for all sets and permute each set's pages, in place."""
        kv_lens = draw_kv_lens(self.cell, rng)
        device = self.sets[0].step.page_table.device
        generator = torch.Generator(device=device).manual_seed(rng.getrandbits(63))
        lens = torch.tensor(kv_lens, dtype=torch.int32)
        for launch in self.sets[:1] if self.shared else self.sets:
            live = launch.step.page_table[:, : self.full_pages]
            order = torch.randperm(live.numel(), generator=generator, device=device)
            live.copy_(live.reshape(-1)[order].view_as(live))
            launch.step.seq_lens.copy_(lens)
        for launch in self.sets:
            launch.step = replace(launch.step, host_kv_lens=kv_lens)

    def latest(self) -> Launch:
        """The set that was used last: no call of the next groups finds it freshly used."""
        return self.sets[self._next - 1]

    def take(self, calls: int) -> list[Launch]:
        """The sets of the next ``calls`` calls: always the ones used longest ago."""
        start, self._next = self._next, (self._next + calls) % len(self.sets)
        return [self.sets[(start + i) % len(self.sets)] for i in range(calls)]
