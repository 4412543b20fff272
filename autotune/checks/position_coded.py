"""``position_coded``: operands whose exact answer names the tokens that were read.

Random data hide a mask that is wrong by one token once the KV is long: its weight sinks into a low-precision
dtype's rounding. Here V codes its position in small integers (exact in every dtype), and

``uniform``  q = 0: the output is the mean of the visible codes. One token more or less moves it by
             1/sqrt(kv_len) of its norm, so lengths stop where that is four times the rounding.
``one_hot``  each query picks one token (the last visible one, or a random one): the output is that token's
             code to a few roundings, while any other token, row, head or page differs by 1 or more in 16
             of 17 elements. Any length.
``hidden``   each query but the last is aligned with the first token that its mask hides. Seen, that token
             takes a large share of the softmax; hidden, the answer is an ordinary one. Any length.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from autotune.arena.operands import Operands, Recipe, Values, codes_of, position_code
from autotune.checks import lengths, oracle
from autotune.checks.blame import FindingError
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Opened, Stage, conduct
from autotune.domain.verdict import FailureKind

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult

LARGEST_CODE = 8.0
MEAN_MARGIN = 4.0
UNIFORM_MAX = 1024  # what bf16 allows; longer masks are ``hidden``'s, at any precision
# Below this head_dim two random +-1 keys may be alike: a query then picks more than one token.
MIN_HEAD_DIM = 64


def uniform_cap(mean_bound: float) -> int:
    """Longest KV at which one token moves the mean by at least ``MEAN_MARGIN`` bounds."""
    return min(UNIFORM_MAX, int((1.0 / (MEAN_MARGIN * mean_bound)) ** 2))


def code_tolerance(stage: Stage) -> float:
    """Absolute error allowed to a code: the roundings of the output, of a weight of 1 and of a partial."""
    column, arithmetic = stage.trial.column, stage.arithmetic
    return (
        2
        * LARGEST_CODE
        * (
            oracle.roundoff(column.dtypes.out)
            + oracle.weights_roundoff(column, arithmetic)
            + oracle.roundoff(arithmetic.partials)
        )
    )


class PositionCoded:
    """Three kinds of exact operands at short and long lengths."""

    name = "position_coded"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Always; a head_dim below 64 leaves the ``uniform`` part only."""
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        trial, column = stage.trial, stage.trial.column
        rng = random.Random(stage.seed(0))
        long = lengths.ends_in(trial, stage.placement, rng)[-1]

        mean_bound = oracle.mean_bound(column, stage.arithmetic)
        cap = min(long, max(column.q_len, uniform_cap(mean_bound)))
        capped = [cap, *lengths.short(trial, rng, column.batch_size - 1)]
        uniform = Recipe(
            tuple(min(cap, n) for n in capped), seed=stage.seed(1), values=Values.POSITION_UNIFORM
        )
        kv_lens = (*lengths.short(trial, rng, column.batch_size - 1), long)
        one_hot = Recipe(kv_lens, seed=stage.seed(2), values=Values.POSITION_ONE_HOT)
        uniform, one_hot = stage.one_pool([uniform, one_hot])
        with stage.opened(uniform) as opened:
            opened.launch(opened.build(uniform), "uniform", bound=mean_bound)
            if column.shape.head_dim < MIN_HEAD_DIM:
                return
            operands = opened.build(one_hot)
            self._one_hot(stage, opened, operands)
            if align_with_hidden(operands):
                opened.launch(operands, "hidden")

    def _one_hot(self, stage: Stage, opened: Opened, operands: Operands) -> None:
        opened.fire(operands, "one_hot")
        codes = target_codes(operands)
        limit = code_tolerance(stage)
        # unwritten and non-finite elements are found first; the tight bound on codes follows
        opened.judge(operands, "one_hot", codes.to(torch.float64), bound=float("inf"))
        error = (operands.out.to(torch.float32) - codes).abs().amax(dim=-1)
        if float(error.max()) <= limit:
            return
        row, head = (int(i) for i in (error > limit).nonzero()[0])
        assert operands.targets is not None
        request, query = divmod(row, operands.column.q_len)
        wanted = f"wanted the code of token {int(operands.targets[request, query])}"
        got = f"got {recognise(operands, row, head)}"
        off = f"off by {float(error[row, head]):.3g}, allowed {limit:.3g}"
        text = stage.describe("one_hot", operands.recipe.kv_lens)
        raise FindingError(
            FailureKind.WRONG_OUTPUT,
            f"{wanted}, {got} ({off}) at {stage.place(operands, row, head)} ({text})",
        )


def target_codes(operands: Operands) -> torch.Tensor:
    """The exact answer of a ``one_hot`` launch: [rows, num_qo_heads, head_dim_vo], fp32."""
    shape = operands.column.shape
    assert operands.targets is not None
    batch, q_len = operands.targets.shape
    rows = torch.arange(batch).repeat_interleave(q_len)
    codes = codes_of(operands.column.dtypes.kv)
    code = position_code(rows, operands.targets.flatten().cpu(), shape.head_dim_vo, codes)
    kv_head = torch.arange(shape.num_qo_heads)[:, None] // shape.group
    rolled = (torch.arange(shape.head_dim_vo)[None, :] - kv_head) % shape.head_dim_vo
    return code[:, rolled].to(operands.out.device)


def recognise(operands: Operands, row: int, head: int) -> str:
    """Whose code an answer is, in words: what a kernel read instead of its target."""
    shape, q_len = operands.column.shape, operands.column.q_len
    found = operands.out[row, head].to(torch.float32).cpu().round()
    kv_head = head // shape.group
    order = sorted(range(len(operands.recipe.kv_lens)), key=lambda request: request != row // q_len)
    for request in order:
        tokens = torch.arange(operands.recipe.kv_lens[request])
        code = position_code(request, tokens, shape.head_dim_vo, codes_of(operands.column.dtypes.kv))
        for other in sorted(range(shape.num_kv_heads), key=lambda h: h != kv_head):
            match = (code.roll(other, dims=1) == found).all(dim=1).nonzero()
            if match.numel():
                return f"that of token {int(match[0])} of request {request}, KV head {other}"
    return "no token's code"


def align_with_hidden(operands: Operands) -> bool:
    """Point each query of a ``one_hot`` launch at a token that its mask hides; False if none hides any."""
    column, step = operands.column, operands.step
    shape, q_len = column.shape, column.q_len
    aligned, pages, slots = False, [], []
    for request, kv_len in enumerate(operands.recipe.kv_lens):
        for i in range(q_len):
            first, end = oracle.visible(kv_len, q_len, i, shape.window_left)
            hidden = first - 1 if first > 0 and (end >= kv_len or i % 2) else end
            if hidden >= kv_len:
                hidden = -1  # nothing to hide: any visible token serves
            page, slot = divmod(hidden if hidden >= 0 else end - 1, shape.page_size)
            pages.append(operands.pages[request][page])
            slots.append(slot)
            aligned = aligned or hidden >= 0
    where = (torch.tensor(pages, device=step.k.device), torch.tensor(slots, device=step.k.device))
    keys = operands.caches[0].tokens(*where).to(step.q.dtype)  # [rows, kv_heads, head_dim], +-1
    # the aligned logit is sqrt(head_dim), the others are standard normal, as the bound assumes
    step.q.copy_(keys.repeat_interleave(shape.group, dim=1))
    return aligned
