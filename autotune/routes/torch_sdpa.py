"""``torch-sdpa``: one ``scaled_dot_product_attention`` call for the whole batch. The CPU's fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.routes.base import Capture, Family, Need
from autotune.routes.torch_support import unsupported

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Allocate, Capacity, Session


class TorchSdpa:
    """Context route: gathers the batch, padded to its longest request, then runs torch's fused attention.

    A handful of operations whatever the batch, so it wins where a launch is short or has one request;
    padding, and a copy that has left the cache before it is read, cost it the others. The GQA group is
    folded into query rows, since ``enable_gqa`` repeats K and V and loses everywhere.
    """

    name = "torch-sdpa"
    family = Family.CONTEXT
    capture = Capture.NO
    needs = frozenset({Need.HOST_KV_LENS, Need.UNIFORM_Q_LEN})
    deterministic = True
    version = 1

    def supports(self, column: Column, facts: Facts) -> str | None:
        """See :func:`autotune.routes.torch_support.unsupported`."""
        return unsupported(column, facts)

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """Allocate for a full batch of the longest requests that ``capacity`` allows."""
        from autotune.routes.torch_sdpa_session import SdpaSession

        return SdpaSession(capacity, allocate)
