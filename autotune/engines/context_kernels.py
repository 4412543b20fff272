"""The context kernels that a hook can call in place of a decode call: ``fmha-v2`` and ``trtllm-gen-context``.

Both take what a decode call has, less cumulative lengths, which are made here on the device, so that all of
it is captured with the call and made anew in every replay. Nothing of one call is kept for the next except
scratch: a table of page offsets that a warm-up left behind would be frozen into a captured graph.

The query of an 8-bit KV cache is cast as the engine's own context path casts it, in the launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.domain.shape import KvLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    import torch

    from autotune.domain.cell import Column
    from autotune.routes.base import Step
    from autotune.routes.flashinfer.call import Call

DEPLOYABLE = frozenset({"fmha-v2", "trtllm-gen-context"})


class Scratch:
    """One workspace per device, made at the first call; never the caller's: XQA keeps semaphores there."""

    def __init__(self) -> None:
        self._made: dict[torch.device, torch.Tensor] = {}

    def give(self, workspace: torch.Tensor) -> None:
        """Use the caller's, uint8 and of nobody else's, on its device."""
        self._made[workspace.device] = workspace

    def on(self, device: torch.device) -> torch.Tensor:
        """uint8, uninitialised: neither kernel needs zeros in it."""
        found = self._made.get(device)
        if found is None:
            import torch

            from autotune.routes.flashinfer.metadata import WORKSPACE_BYTES

            # the CPU has only stand-ins, which need none
            size = WORKSPACE_BYTES if device.type == "cuda" else 1
            found = self._made[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return found


def cumulative(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [batch + 1] each: cumulative query lengths and KV lengths in tokens."""
    import torch

    batch, device = step.batch_size, step.q.device
    of_q = torch.arange(0, batch * step.q_len + 1, step.q_len, dtype=torch.int32, device=device)
    of_kv = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    torch.cumsum(step.seq_lens, 0, dtype=torch.int32, out=of_kv[1:])
    return of_q, of_kv


def _query(step: Step, name: str) -> torch.Tensor:
    from autotune.routes.flashinfer.metadata import torch_dtype

    return step.q.to(torch_dtype(name)).contiguous()


def _fmha_v2(step: Step, column: Column, scratch: Scratch) -> Call:
    import torch

    from autotune.routes.flashinfer import fmha_v2
    from autotune.routes.flashinfer.layout import block_delta

    shape = column.shape
    table = step.page_table
    if KvLayout(shape.kv_layout) in fmha_v2.FUSED:
        table = torch.stack((table, table + block_delta(step.k, step.v)), dim=1)
    of_q, of_kv = cumulative(step)
    return fmha_v2.call(
        step,
        _query(step, fmha_v2.query_dtype(column)),
        step.seq_lens,
        table,
        kv_layout=shape.kv_layout,
        workspace=scratch.on(step.q.device),
        window_left=shape.window_left,
        soft_cap=shape.soft_cap,
        cum_seq_lens_q=of_q,
        cum_seq_lens_kv=of_kv,
    )


def _trtllm_gen(step: Step, column: Column, scratch: Scratch) -> Call:
    import torch

    from autotune.routes.flashinfer import trtllm_gen

    of_q, of_kv = cumulative(step)
    size = trtllm_gen.counter_bytes(step.batch_size, column.shape.num_qo_heads)
    return trtllm_gen.context_call(
        step,
        _query(step, trtllm_gen.query_dtype(column)),
        step.seq_lens,
        step.page_table,
        workspace=scratch.on(step.q.device),
        counters=torch.zeros(size, dtype=torch.uint8, device=step.q.device),
        window_left=column.shape.window_left,
        cum_seq_lens_q=of_q,
        cum_seq_lens_kv=of_kv,
    )


_BUILD: Mapping[str, Callable[[Step, Column, Scratch], Call]] = {
    "fmha-v2": _fmha_v2,
    "trtllm-gen-context": _trtllm_gen,
}


def run(route: str, step: Step, column: Column, scratch: Scratch, out: torch.Tensor) -> Any:
    """Launch ``route`` into ``out`` [rows, heads, head_dim_vo]; returns ``out``.

    Raises:
        KeyError: a route that is not in :data:`DEPLOYABLE`.
        Exception: whatever the library raises.
    """
    from autotune.routes.flashinfer.call import resolve

    call = _BUILD[route](step, column, scratch)
    resolve(call.target)(*call.args, **call.kwargs, out=out)
    return out
