"""``fa2-decode``: ``BatchDecodeWithPagedKVCacheWrapper(use_tensor_cores=True)``.

It runs the fa2 context kernel with one q_len for all requests, and refuses a row whose kv_len is below
q_len: an engine that pads with shorter rows cannot plan it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.routes.base import Capture, Family, Need
from autotune.routes.contract import ContractError
from autotune.routes.flashinfer import limits
from autotune.routes.flashinfer.call import Call
from autotune.routes.flashinfer.fa_prefill import fa2_unsupported
from autotune.routes.flashinfer.installed import Installed
from autotune.routes.flashinfer.metadata import torch_dtype
from autotune.routes.flashinfer.planned import PageLists, PlannedSession

if TYPE_CHECKING:
    import torch

    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Allocate, Capacity, Session, Step

WRAPPER = "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper"


def wrapper_call(
    *,
    workspace: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_len: torch.Tensor,
) -> Call:
    """The constructor; ``backend`` is explicit, since ``auto`` changes with dtype and version."""
    return Call(
        f"{WRAPPER}.__init__",
        {
            "float_workspace_buffer": workspace,
            "kv_layout": "NHD",
            "use_cuda_graph": True,
            "use_tensor_cores": True,
            "paged_kv_indptr_buffer": kv_indptr,
            "paged_kv_indices_buffer": kv_indices,
            "paged_kv_last_page_len_buffer": last_page_len,
            "backend": "fa2",
        },
    )


def plan_call(column: Column, step: Step, lists: PageLists) -> Call:
    """``plan``; everything after ``page_size`` by keyword, as the library asks."""
    shape, dtypes = column.shape, column.dtypes
    return Call(
        f"{WRAPPER}.plan",
        {
            "indptr": lists.indptr,
            "indices": lists.indices,
            "last_page_len": lists.last_page_len,
            "num_qo_heads": shape.num_qo_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "page_size": shape.page_size,
            "window_left": shape.window_left,
            "logits_soft_cap": shape.soft_cap,
            "q_data_type": torch_dtype(dtypes.q),
            "kv_data_type": torch_dtype(dtypes.kv),
            "o_data_type": torch_dtype(dtypes.out),
            "sm_scale": float(step.sm_scale),
            "seq_lens": lists.seq_lens,
            "q_len_per_req": step.q_len,
        },
    )


def run_call(column: Column, step: Step, query: torch.Tensor) -> Call:
    """``run``, less its output; a v_scale other than 1 is one more kernel over the output."""
    kwargs: dict[str, Any] = {"q": query, "paged_kv_cache": (step.k, step.v)}
    if column.dtypes.kv not in limits.SIXTEEN_BIT:
        kwargs["k_scale"] = float(step.k_scale)
        kwargs["v_scale"] = float(step.v_scale)
    if step.kv_block_scales is not None:
        kwargs["kv_cache_sf"] = step.kv_block_scales
    return Call(f"{WRAPPER}.run", kwargs)


class Fa2Decode(Installed):
    """The decode wrapper over the fa2 templates."""

    name = "fa2-decode"
    family = Family.DECODE
    capture = Capture.REPLAN
    needs = frozenset({Need.HOST_KV_LENS, Need.UNIFORM_Q_LEN})
    deterministic = False
    version = 1

    def supports(self, column: Column, facts: Facts) -> str | None:
        """See ``Route.supports``."""
        return fa2_unsupported(column, facts, "fa2-decode")

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """See ``Route.open``."""
        return _Session(capacity, allocate, torch_dtype(capacity.column.dtypes.q))


class _Session(PlannedSession):
    def wrapper_call(self, batch: int) -> Call:
        return wrapper_call(
            workspace=self._float_workspace,
            kv_indptr=self._indptr[: batch + 1],
            kv_indices=self._indices,
            last_page_len=self._last_page_len[:batch],
        )

    def plan_call(self, step: Step, lists: PageLists) -> Call:
        shortest = int(lists.seq_lens.min())
        if step.q_len > 1 and shortest < step.q_len:
            raise ContractError(
                "lengths", f"kv_len {shortest} is below q_len {step.q_len}, which the plan refuses"
            )
        return plan_call(self._capacity.column, step, lists)

    def run_call(self, step: Step, query: torch.Tensor) -> Call:
        return run_call(self._capacity.column, step, query)
