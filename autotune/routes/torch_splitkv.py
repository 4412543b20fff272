"""``torch-splitkv``: request by request over blocks of 64 pages, merged by their log-sum-exps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.routes.base import Capture, Family, Need
from autotune.routes.torch_support import unsupported

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Allocate, Capacity, Session


class TorchSplitKv:
    """Decode route: no padding, and every block is read while it is still in the cache.

    A block's attention is torch's fused CPU kernel, called below ``scaled_dot_product_attention`` because
    only there it also returns the log-sum-exp; logits and sums are fp32 in either dtype.
    """

    name = "torch-splitkv"
    family = Family.DECODE
    capture = Capture.NO
    needs = frozenset({Need.HOST_KV_LENS, Need.UNIFORM_Q_LEN})
    deterministic = True
    version = 1

    def supports(self, column: Column, facts: Facts) -> str | None:
        """See :func:`autotune.routes.torch_support.unsupported`."""
        return unsupported(column, facts)

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """Allocate one block of K and V, and partial results for the longest request."""
        from autotune.routes.torch_splitkv_session import SplitKvSession

        return SplitKvSession(capacity, allocate)
