"""``workspace``: how much of its workspace a route writes, and whether that much is enough.

Engines hand over 128 to 512 MiB because a library says so. Here the workspace is filled with a pattern; what
has changed after launches at the column's full batch, short and long, marks the high-water mark.
Then a session gets a workspace of exactly that size (in whole ``ALIGNMENT``), its end at unmapped memory: a
launch that needs more is refused by the library or is wrong, which is stated as a limit, or it faults, which
ends the child and fails the row. That blames a size which was chosen here, not the route: no part of a proof,
since an engine's workspace is as large as its library asks for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from autotune.arena.base import Placement
from autotune.arena.operands import Recipe
from autotune.checks import lengths
from autotune.checks.blame import FindingError, UnfitError
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Opened, Stage, conduct

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult

NAME = "workspace"  # as the built-in routes call theirs
PATTERN = 0xA5
ALIGNMENT = 256
LAUNCHES = 3


class Sizes:
    """Hands out a session's buffers, the workspace patterned, and of another size if one is given."""

    def __init__(self, nbytes: int | None) -> None:
        self.nbytes = nbytes
        self.asked: int | None = None
        self.buffer: torch.Tensor | None = None
        self._before: torch.Tensor | None = None

    def resize(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
        """The shape to allocate for ``name``."""
        if name != NAME:
            return shape
        if dtype != torch.uint8 or len(shape) != 1:
            raise NotImplementedError(f"a workspace is bytes, not {dtype} of shape {shape}")
        self.asked = shape[0]
        return (self.nbytes,) if self.nbytes is not None else shape

    def made(self, name: str, tensor: torch.Tensor) -> None:
        """Pattern the workspace."""
        if name == NAME:
            tensor.fill_(PATTERN)
            self.buffer = tensor

    def opened(self) -> None:
        """The session is open: what it has written by now (zeros) is the content to start from."""
        if self.buffer is not None:
            self._before = self.buffer.clone()

    def high_water(self) -> int:
        """Bytes up to the last one that has changed; all, if the session itself had filled the last one."""
        assert self.buffer is not None and self._before is not None
        if int(self._before[-1]) != PATTERN:
            return self.buffer.numel()
        changed = (self.buffer != self._before).nonzero()
        return int(changed[-1]) + 1 if len(changed) else 0


class Workspace:
    """Find the high-water mark, then do with that much."""

    name = "workspace"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Always; a route without a workspace says so."""
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        if stage.placement is Placement.HEAD:
            return  # what is behind a workspace matters, not what is before it
        sizes = Sizes(None)
        with self._opened(stage, sizes) as opened:
            if sizes.buffer is None:
                stage.limits.append("no workspace")
                return
            self._work(stage, opened)
            used = sizes.high_water()
        exact = max(ALIGNMENT, -(-used // ALIGNMENT) * ALIGNMENT)
        whole = f"of {sizes.asked} workspace bytes"
        if sizes.asked is None or exact >= sizes.asked:
            stage.limits.append(f"all {whole} are written")
            return
        try:
            with self._opened(stage, Sizes(exact)) as opened:
                self._work(stage, opened)
        except (FindingError, UnfitError) as error:
            stage.limits.append(f"{used} {whole} written, but {exact} are too few: {error}"[:200])
            return
        stage.limits.append(f"{used} {whole} written, and {exact} suffice")

    def _work(self, stage: Stage, opened: Opened) -> None:
        rng = random.Random(stage.seed(0))
        for index, recipe in enumerate(_recipes(stage, rng), 1):
            opened.launch(opened.build(recipe), f"workspace {index}/{LAUNCHES}")

    @contextmanager
    def _opened(self, stage: Stage, sizes: Sizes) -> Iterator[Opened]:
        recipes = _recipes(stage, random.Random(stage.seed(0)))
        with stage.opened(recipes[0], sizes) as opened:
            yield opened


def _recipes(stage: Stage, rng: random.Random) -> list[Recipe]:
    """All short, all but one short and one longest, all of a medium length."""
    trial, size = stage.trial, stage.trial.column.batch_size
    longest = lengths.longest(trial)
    medium = min(longest, max(trial.column.q_len, 4096 // size))
    batches = [
        lengths.short(trial, rng, size),
        [*lengths.short(trial, rng, size - 1), longest],
        [medium] * size,
    ]
    return stage.one_pool([Recipe(tuple(lens), seed=stage.seed(i + 1)) for i, lens in enumerate(batches)])
