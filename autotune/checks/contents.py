"""What a check does to the contents of operands between two steps of a route: withheld, then renewed."""

from __future__ import annotations

import torch

from autotune.arena.contents import bits
from autotune.arena.kv_cache import NAN_BITS
from autotune.arena.operands import Operands


def live_pages(operands: Operands) -> torch.Tensor:
    """Ids of the pages that some request owns, int64 on the operands' device."""
    ids = [page_id for pages in operands.pages for page_id in pages]
    return torch.tensor(ids, dtype=torch.int64).to(operands.step.k.device)


def renew(operands: Operands) -> None:
    """Other queries, keys and values at the same addresses, under the same metadata: an engine's next layer.

    Each of the three is changed on its own, so that an old copy of any of them gives another result.
    """
    step, live = operands.step, live_pages(operands)
    bits(step.q).copy_(bits(step.q).roll(1, dims=-1))
    for cache in operands.caches:
        cache.reverse(live)


class Withheld:
    """NaN in the query and in every live page, from here until :meth:`restore`.

    An engine prepares once a step and writes q, K and V layer by layer afterwards: what a route reads, copies
    or caches of them before ``run`` is not what it will be asked about.
    """

    def __init__(self, operands: Operands) -> None:
        step, live = operands.step, live_pages(operands)
        rows = torch.arange(step.q.shape[0], device=step.q.device)
        named = [("q", step.q, rows), ("k", step.k, live), ("v", step.v, live)]
        if step.kv_block_scales is not None:
            k_scales, v_scales = step.kv_block_scales
            named += [("k_block_scales", k_scales, live), ("v_block_scales", v_scales, live)]
        self._places = [(name, bits(tensor), index) for name, tensor, index in named]
        self._held = [raw.index_select(0, index) for _, raw, index in self._places]
        self._left = [torch.empty_like(held) for held in self._held]
        for _, raw, index in self._places:
            raw.index_fill_(0, index, NAN_BITS[raw.element_size()])

    def restore(self) -> None:
        """Put the contents back. Allocates nothing: what is allocated while a route is called is guarded."""
        for (_, raw, index), held, left in zip(self._places, self._held, self._left, strict=True):
            torch.index_select(raw, 0, index, out=left)
            raw.index_copy_(0, index, held)

    def overwritten(self) -> list[str]:
        """Inputs that were written before :meth:`restore`."""
        return [
            name
            for (name, raw, _), left in zip(self._places, self._left, strict=True)
            if bool((left != NAN_BITS[raw.element_size()]).any())
        ]
