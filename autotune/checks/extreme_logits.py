"""``extreme_logits``: logits far from zero, alike or spread, positive or negative.

Kernels stand in for minus infinity with a finite number and for the running maximum with a finite start:
where every live logit is below that number, masked tokens win, rows come out as zero or NaN. How far a kernel
can be trusted is a property of the route that an engine should know, so this check *states limits*. It tries
``ORDINARY`` logits, which do occur in served models: a kernel that cannot do those is wrong, not limited.
Then it tries the largest; where those are wrong it climbs from one magnitude to the next and names the last
that was right.

The query is ``a w`` for a vector ``w`` of +-1 and a scalar a of four significant bits, and each key ``w``
(alike) or ``w`` with some signs turned (spread): every dtype holds them exactly, a query that the kernel
itself rounds to e4m3 included, products and their sums are exact in fp32, and tokens that count have equal
logits. What magnitude alone then costs is the log-sum-exp of a KV split, in fp32 and
often in base 2: two partials with an error of ``log2(e) |logit| u(fp32)`` each, rounded when made and when
scaled. ``8 |logit| u(fp32)`` is added to the bound.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from autotune.arena.operands import Operands, Recipe, pages_of
from autotune.checks import lengths, oracle
from autotune.checks.blame import FindingError
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Opened, Stage, conduct
from autotune.domain.verdict import FailureKind

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult

ORDINARY = 1e2
# FlashInfer's fa2 had 5e4 as infinity up to 0.6.18; fp16 ends at 65504.
MAGNITUDES = (ORDINARY, 1e3, 1e4, 4e4, 1e5, 2e5)
LARGEST_QUERY = {"e4m3": 448.0, "fp16": 65504.0}
# Of a query's element: what e4m3, the coarsest type, keeps.
SIGNIFICANT_BITS = 4
# One sign in this many is turned where logits are to be spread.
TURNED = 64
SPLIT_ROUNDINGS = 8.0  # see above
LIMITING = (FailureKind.WRONG_OUTPUT, FailureKind.NAN_LEAK)


def query_value(trial: Trial, magnitude: float) -> float | None:
    """The query's elements for logits of ``magnitude`` or a little more; None if its dtype ends before."""
    column = trial.column
    mantissa, exponent = math.frexp(magnitude / math.sqrt(column.shape.head_dim))
    value = math.ldexp(math.ceil(math.ldexp(mantissa, SIGNIFICANT_BITS)), exponent - SIGNIFICANT_BITS)
    return value if value <= LARGEST_QUERY.get(column.dtypes.q, math.inf) else None


def allowance(magnitude: float) -> float:
    """What a correct kernel may lose to the magnitude of its logits."""
    return SPLIT_ROUNDINGS * magnitude * oracle.roundoff("fp32")


class ExtremeLogits:
    """A ragged batch of short rows; each sign and contents climbs until it fails."""

    name = "extreme_logits"
    version = VERSIONS[name]

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
        recipe = Recipe(tuple(lengths.short(trial, rng, trial.column.batch_size)), seed=stage.seed(1))
        ordinary = stage.tally.worst_error
        with stage.opened(recipe) as opened:
            operands = opened.build(recipe)
            aligned = Aligned(operands)
            for contents in ("alike", "spread"):
                aligned.write_keys(spread=contents == "spread")
                for sign in (-1, 1):
                    Attempts(stage, opened, operands, aligned, sign, contents).climb()
        # what a route errs by out here is not its accuracy
        stage.tally.worst_error = ordinary


@dataclass
class Attempts:
    """Launches of one sign and contents."""

    stage: Stage
    opened: Opened
    operands: Operands
    aligned: Aligned
    sign: int
    contents: str

    def climb(self) -> None:
        """Ordinary logits, then the largest; only where those are wrong, all between.

        Raises:
            FindingError: ordinary logits are wrong, or something else than a number is.
        """
        reachable = [magnitude for magnitude in MAGNITUDES if query_value(self.stage.trial, magnitude)]
        word = "positive" if self.sign > 0 else "negative"
        if not reachable or reachable[-1] != MAGNITUDES[-1]:
            tried = reachable[-1] if reachable else 0.0
            _state(self.stage, f"{word} logits tested up to {tried:g}, where the query's dtype ends")
        for magnitude in reachable[:1]:
            if failed := self._wrong_at(magnitude, word):
                raise failed
        if not reachable[1:] or self._wrong_at(reachable[-1], word) is None:
            return
        for right, magnitude in pairwise(reachable):
            if magnitude == reachable[-1] or self._wrong_at(magnitude, word):
                _state(self.stage, f"{word} logits up to {right:g} in magnitude")
                return

    def _wrong_at(self, magnitude: float, word: str) -> FindingError | None:
        value = query_value(self.stage.trial, magnitude)
        assert value is not None
        logit = self.aligned.write_queries(self.sign * value)
        bound = self.stage.bound + allowance(abs(logit))
        try:
            self.opened.launch(self.operands, f"{word} logits of {magnitude:g}, {self.contents}", bound=bound)
        except FindingError as finding:
            if finding.kind not in LIMITING:
                raise
            return finding
        return None


def _state(stage: Stage, limit: str) -> None:
    if limit not in stage.limits:
        stage.limits.append(limit)


class Aligned:
    """Operands whose queries and live keys point along one vector of +-1, each KV head's its own. V stays."""

    def __init__(self, operands: Operands) -> None:
        step, shape = operands.step, operands.column.shape
        device = step.q.device
        generator = torch.Generator().manual_seed(operands.recipe.seed)
        signs = torch.randn((shape.num_kv_heads, shape.head_dim), generator=generator).sign()
        signs[signs == 0] = 1.0
        self._signs = signs.to(device)
        self._operands, self._group = operands, shape.group
        self._sinks = None if step.sinks is None else step.sinks.clone()
        pages, slots = [], []
        for owned, kv_len in zip(operands.pages, operands.recipe.kv_lens, strict=True):
            tokens = torch.arange(kv_len)
            ids = torch.tensor(owned[: pages_of(kv_len, shape.page_size)], dtype=torch.int64)
            pages.append(ids[tokens // shape.page_size])
            slots.append(tokens % shape.page_size)
        self._places = torch.cat(pages).to(device), torch.cat(slots).to(device)

    def write_keys(self, *, spread: bool) -> None:
        """Every live key the vector, some of its signs turned where logits are to be ``spread``."""
        keys = self._signs.expand(len(self._places[0]), -1, -1)
        if spread:
            seed = self._operands.recipe.seed
            generator = torch.Generator(device=keys.device).manual_seed(seed)
            turned = torch.rand(keys.shape, generator=generator, device=keys.device) * TURNED < 1.0
            keys = torch.where(turned, -keys, keys)
        self._operands.caches[0].write_tokens(*self._places, keys, exact=True)

    def write_queries(self, value: float) -> float:
        """Every query ``value`` times the vector; returns its logit with the vector itself."""
        step = self._operands.step
        logit = value * self._signs.shape[1] * step.sm_scale * step.k_scale
        queries = self._signs.repeat_interleave(self._group, dim=0) * value
        step.q.copy_(queries.expand(step.q.shape).to(step.q.dtype))
        if self._sinks is not None and step.sinks is not None:
            # a sink far from all logits leaves nothing to compare
            step.sinks.copy_(self._sinks + logit)
        return logit
