"""What FlashInfer's Python layer makes of our routes' calls: the launchers' positional arguments.

Written down from flashinfer/decode.py and prefill.py, so that the launcher can be tested where FlashInfer is
not installed; ``drive_emulation.py`` compares it with what an installed one passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autotune.arena.host_mmap import HostMmapArena
from autotune.arena.operands import Operands, Recipe, build
from autotune.checks import oracle
from autotune.domain.cell import Column
from autotune.routes.flashinfer.call import Call
from autotune.routes.flashinfer.emulation.launcher import launch
from autotune.routes.flashinfer.emulation.route import SM_COUNT, workspace_bytes
from autotune.routes.flashinfer.trtllm_gen import CONTEXT, context_call, counter_bytes, decode_call
from autotune.worker.base import Channel


def function_of(call: Call) -> str:
    """The launcher that a call ends in."""
    phase = "context" if call.target == CONTEXT else "decode"
    return f"trtllm_paged_attention_{phase}"


def positional(call: Call, out: torch.Tensor, *, older: bool = False) -> list[Any]:
    """The launcher's arguments for ``call``; ``older``: 0.6.18's, without ``lse_scale``."""
    given = call.kwargs
    context = call.target == CONTEXT
    k, v = given["kv_cache"]
    k_scales, v_scales = given["kv_cache_sf"] or (None, None)
    query, workspace = given["query"], given["workspace_buffer"]
    if context:
        max_q_len, max_kv_len, batch = given["max_q_len"], given["max_kv_len"], given["batch_size"]
    else:
        max_kv_len, q_len = given["max_seq_len"], given["q_len_per_req"]
        max_q_len = given["max_q_len"] if q_len is None else q_len
        batch = given["cum_seq_lens_q"].shape[0] - 1 if q_len is None else query.shape[0] // q_len
    head = [out, None, query, k, v, workspace, given["multi_ctas_kv_counter_buffer"], given["block_tables"]]
    head += [given["seq_lens"], max_q_len, max_kv_len, given["bmm1_scale"], given["bmm2_scale"], -1.0, -1, 0]
    head += [batch, given["window_left"]]
    machine = [SM_COUNT, True, workspace.numel() * workspace.element_size(), given["sinks"]]
    lse = [None] if older else [None, 1.0]
    if context:
        offsets = [given["cum_seq_lens_q"], given["cum_seq_lens_kv"]]
        return [*head, *offsets, *machine, k_scales, v_scales, None, True, None, None, True, *lse, 0, 0]
    tail = [given["cum_seq_lens_q"], k_scales, v_scales, None, True, *lse, 0, 0, False, None, 0, None]
    return [*head, 0, *machine, *tail]


def call_of(operands: Operands, route: str, arena: HostMmapArena, *, window_left: int | None = None) -> Call:
    """The call that a route's session makes of a step; its query is the step's own."""
    step, shape = operands.step, operands.column.shape
    batch = step.batch_size
    counters = arena.tensor("counters", (counter_bytes(batch, shape.num_qo_heads),), torch.uint8)
    counters.zero_()
    own: dict[str, Any] = {
        "workspace": arena.tensor("workspace", (workspace_bytes(operands.column),), torch.uint8),
        "counters": counters,
        "window_left": shape.window_left if window_left is None else window_left,
    }
    metadata = (step, step.q, step.seq_lens, step.page_table)
    if route == "decode":
        return decode_call(*metadata, **own)
    cum_q = arena.tensor("cum_q", (batch + 1,), torch.int32)
    cum_q.copy_(torch.arange(batch + 1) * step.q_len)
    if route == "ragged":
        return decode_call(*metadata, **own, cum_seq_lens_q=cum_q)
    cum_kv = arena.tensor("cum_kv", (batch + 1,), torch.int32)
    cum_kv[0] = 0
    cum_kv[1:] = torch.cumsum(step.seq_lens, 0)
    return context_call(*metadata, **own, cum_seq_lens_q=cum_q, cum_seq_lens_kv=cum_kv)


def error_of(operands: Operands, args: list[Any], function: str) -> float:
    """Launch, and the largest error against the fp64 oracle."""
    launch(function, args)
    return oracle.worst(operands.out, oracle.reference(operands)).error


@dataclass(frozen=True)
class NarrowTable:
    """A job: a launch whose page table is one page too narrow for its last request."""

    column: dict[str, Any]
    kv_lens: tuple[int, ...]
    width: int

    def __call__(self, channel: Channel) -> str:
        """Never comes back if the table is guarded."""
        with HostMmapArena() as arena:
            operands = build(arena, Column.from_dict(self.column), Recipe(self.kv_lens, seed=1), "cpu")
            narrow = arena.tensor("narrow_table", (len(self.kv_lens), self.width), torch.int32)
            narrow.copy_(operands.step.page_table[:, : self.width])
            operands.step.page_table = narrow
            call = call_of(operands, "decode", arena)
            channel.step("launch")
            launch(function_of(call), positional(call, operands.out))
        return "came back"
