"""``extreme_logits``: logits far from zero, alike or spread, positive or negative.

Kernels stand in for minus infinity with a finite number and for the running maximum with a finite start:
where every live logit is below that number, masked tokens win, rows come out as zero or NaN. How far a kernel
can be trusted is a property of the route that an engine should know, so this check *states limits*: it climbs
from one magnitude to the next until the answer is wrong and names the last that was right. Logits up to
``ORDINARY`` do occur in served models; a kernel that cannot do those is wrong, not limited.

The query is ``a w`` for a vector ``w`` of +-1 and a scalar a, and each key ``w`` (alike) or ``w`` with some
signs turned (spread): every dtype holds them exactly, products and their sums are exact in fp32, and tokens
that count have equal logits. What magnitude alone then costs is the log-sum-exp of a KV split, in fp32 and
often in base 2: two partials with an error of ``log2(e) |logit| u(fp32)`` each, rounded when made and when
scaled. ``8 |logit| u(fp32)`` is added to the bound.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import torch

from autotune.arena.operands import Operands, Recipe, pages_of
from autotune.checks import lengths, oracle
from autotune.checks.launch import FindingError, Opened, Stage, conduct
from autotune.domain.verdict import FailureKind

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult

ORDINARY = 1e2
# FlashInfer's fa2 had 5e4 as infinity up to 0.6.18; fp16 ends at 65504.
MAGNITUDES = (ORDINARY, 1e3, 1e4, 4e4, 1e5, 2e5)
LARGEST_QUERY = {"e4m3": 448.0, "fp16": 65504.0}
# One sign in this many is turned where logits are to be spread.
TURNED = 64
SPLIT_ROUNDINGS = 8.0  # see above
LIMITING = (FailureKind.WRONG_OUTPUT, FailureKind.NAN_LEAK)


def query_value(trial: Trial, magnitude: float) -> float | None:
    """The query's elements for logits of about ``magnitude``; None if its dtype does not reach that far."""
    column = trial.column
    value = magnitude / math.sqrt(column.shape.head_dim)
    return value if value <= LARGEST_QUERY.get(column.dtypes.q, math.inf) else None


def allowance(magnitude: float) -> float:
    """What a correct kernel may lose to the magnitude of its logits."""
    return SPLIT_ROUNDINGS * magnitude * oracle.roundoff("fp32")


class ExtremeLogits:
    """A ragged batch of short rows; each sign and contents climbs until it fails."""

    name = "extreme_logits"
    version = 1

    def applies(self, trial: Trial) -> str | None:
        """Not under a soft cap, which keeps logits small."""
        if trial.column.shape.soft_cap > 0.0:
            return "a soft cap bounds the logits"
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        trial = stage.trial
        rng = random.Random(stage.seed(0))
        kv_lens = tuple(lengths.short(trial, rng, trial.column.batch_size))
        ordinary = stage.tally.worst_error
        with stage.opened(Recipe(kv_lens, seed=stage.seed(1))) as opened:
            for sign, contents in ((-1, "alike"), (1, "alike"), (-1, "spread"), (1, "spread")):
                self._climb(stage, opened, kv_lens, sign, contents)
        # what a route errs by out here is not its accuracy
        stage.tally.worst_error = ordinary

    def _climb(
        self, stage: Stage, opened: Opened, kv_lens: tuple[int, ...], sign: int, contents: str
    ) -> None:
        right = 0.0
        for index, magnitude in enumerate(MAGNITUDES):
            value = query_value(stage.trial, magnitude)
            if value is None:
                _state(stage, f"{word(sign)} logits tested up to {right:g}, where the query's dtype ends")
                return
            operands = opened.build(Recipe(kv_lens, seed=stage.seed(2 + index)))
            align(operands, sign * value, contents == "spread")
            if operands.step.sinks is not None:  # a sink far from all logits leaves nothing to compare
                operands.step.sinks += sign * magnitude
            bound = stage.bound + allowance(magnitude)
            try:
                opened.launch(operands, f"{word(sign)} logits of {magnitude:g}, {contents}", bound=bound)
            except FindingError as finding:
                if finding.kind not in LIMITING or magnitude <= ORDINARY:
                    raise
                _state(stage, f"{word(sign)} logits below {magnitude:g} in magnitude")
                return
            right = magnitude


def _state(stage: Stage, limit: str) -> None:
    if limit not in stage.limits:
        stage.limits.append(limit)


def word(sign: int) -> str:
    """A sign in words."""
    return "positive" if sign > 0 else "negative"


def align(operands: Operands, value: float, spread: bool) -> None:
    """Give every query ``value`` times a vector of +-1 and every live key that vector, some signs turned.

    Each KV head has a vector of its own. V stays as it is.
    """
    step, column = operands.step, operands.column
    shape = column.shape
    generator = torch.Generator().manual_seed(operands.recipe.seed)
    signs = torch.randn((shape.num_kv_heads, shape.head_dim), generator=generator).sign()
    signs[signs == 0] = 1.0
    queries = signs.repeat_interleave(shape.group, dim=0) * value
    step.q.copy_(queries.expand(step.q.shape).to(step.q.dtype))
    keys_of = operands.caches[0]
    for pages, kv_len in zip(operands.pages, operands.recipe.kv_lens, strict=True):
        keys = signs.repeat(kv_len, 1, 1)
        if spread:
            turned = torch.rand(keys.shape, generator=generator) * TURNED < 1.0
            keys = torch.where(turned, -keys, keys)
        tokens = torch.arange(kv_len)
        owned = torch.tensor(pages[: pages_of(kv_len, shape.page_size)])
        at = owned[tokens // shape.page_size].to(step.k.device), (tokens % shape.page_size).to(step.k.device)
        keys_of.write_tokens(*at, keys.to(step.k.device), exact=True)
