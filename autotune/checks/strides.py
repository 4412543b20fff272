"""``strides``: operands that are views, as an engine's are.

The query is a slice of a packed QKV projection. K and V are already views of the column's KV layout; where
there is one KV head (or one query head) its stride carries no meaning and gets an odd value, as slicing
leaves one: ``is_contiguous()`` does not look at it, kernels that compute from it do.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from autotune.arena.operands import Operands, QueryStride, Recipe
from autotune.checks import lengths
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Stage, conduct

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult

ODD_STRIDE = 7


class Strides:
    """Packed queries; then both sides' size-1 dimensions with odd strides, where there are any."""

    name = "strides"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Always."""
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        trial, shape = stage.trial, stage.trial.column.shape
        rng = random.Random(stage.seed(0))
        kv_lens = tuple(lengths.short(trial, rng, trial.column.batch_size))
        packed = Recipe(kv_lens, seed=stage.seed(1), query_stride=QueryStride.PACKED_QKV)
        with stage.opened(packed) as opened:
            # two strides in one session: what was cached for the first must not serve the second
            opened.launch(opened.build(Recipe(kv_lens, seed=stage.seed(2))), "contiguous q")
            operands = opened.build(packed)
            opened.launch(operands, f"q a slice of packed QKV, {shape.kv_layout} KV")
            if 1 in (shape.num_kv_heads, shape.num_qo_heads):
                _make_odd(operands)
                opened.launch(operands, "one head, its stride meaningless")


def _odd(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """``tensor`` with a meaningless stride in its size-1 dimension ``dim``."""
    strides = list(tensor.stride())
    strides[dim] = ODD_STRIDE
    return tensor.as_strided(tensor.shape, strides)


def _make_odd(operands: Operands) -> None:
    step, shape = operands.step, operands.column.shape
    if shape.num_kv_heads == 1:
        step.k, step.v = _odd(step.k, 2), _odd(step.v, 2)
        if step.kv_block_scales is not None:
            k_scales, v_scales = step.kv_block_scales
            step.kv_block_scales = (_odd(k_scales, 2), _odd(v_scales, 2))
    if shape.num_qo_heads == 1:
        step.q = _odd(step.q, 1)
