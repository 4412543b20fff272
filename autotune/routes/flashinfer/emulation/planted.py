"""The emulated routes with one mistake each in what an engine hands to the library.

The kernels are right, and so is our session: the mistake is made between it and FlashInfer's function, in the
arguments that an engine would get wrong. Each is a way in which a call went wrong in an engine, or one that
the launcher's source invites.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autotune.domain.route_name import EMULATED

if TYPE_CHECKING:
    from autotune.routes.base import Allocate, Step

DECODE, RAGGED, CONTEXT = "trtllm-gen-decode", "trtllm-gen-decode-ragged", "trtllm-gen-context"

Change = Callable[[dict[str, Any], "Step", "Allocate"], None]


@dataclass(frozen=True, slots=True)
class Planting:
    """A mistake in the calls of the route called ``base``."""

    base: str
    change: Change


MISTAKES: dict[str, Planting] = {}


def _plant(mistake: str, *bases: str) -> Callable[[Change], Change]:
    """Register a mistake for each of ``bases``, as ``emulated-<mistake>-in-<base>``."""

    def register(change: Change) -> Change:
        for base in bases:
            MISTAKES[f"{EMULATED}{mistake}-in-{base}"] = Planting(base, change)
        return change

    return register


def _copy(tensor: torch.Tensor, allocate: Allocate, name: str) -> torch.Tensor:
    made = allocate(name, tuple(tensor.shape), tensor.dtype)
    made.copy_(tensor)
    return made


def _spread(pool: torch.Tensor, allocate: Allocate, name: str) -> torch.Tensor:
    """A copy of an HND pool with 16 more elements between its pages, all of them zero."""
    pages, *inner = pool.shape
    page = inner[0] * inner[1] * inner[2]
    whole = allocate(name, (pages, page + 16), pool.dtype)
    whole.view(torch.uint8).zero_()
    made = whole[:, :page].view(pages, *inner)
    made.copy_(pool)
    return made


@_plant("lengths-without-the-new-tokens", DECODE, RAGGED, CONTEXT)
def _kv_only_lengths(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """Lengths as a prefill has them: what was in the cache before this step."""
    call["seq_lens"] = _copy(call["seq_lens"] - step.q_len, allocate, "kv_only_lens")


@_plant("query-lengths", DECODE, CONTEXT)
def _query_lengths(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """The lengths of the new part alone."""
    call["seq_lens"] = _copy(torch.full_like(call["seq_lens"], step.q_len), allocate, "query_lens")


@_plant("int64-lengths", DECODE, CONTEXT)
def _long_lengths(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """Nobody looks at the dtype: every second request is 0 tokens long."""
    call["seq_lens"] = _copy(call["seq_lens"].long(), allocate, "long_lens")


@_plant("narrow-table", DECODE, RAGGED, CONTEXT)
def _narrow_table(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """One page less than the longest request has: the last row's end is past the table's."""
    page = call["kv_cache"][0].shape[-2]
    width = max(1, -(-int(step.seq_lens.max()) // page) - 1)
    call["block_tables"] = _copy(call["block_tables"][:, :width], allocate, "narrow_table")


@_plant("sliced-table", DECODE, CONTEXT)
def _sliced_table(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """A slice of a wider table: the row stride is taken from the width."""
    batch, width = call["block_tables"].shape
    whole = allocate("wide_table", (batch, width + 1), torch.int32)
    whole.zero_()
    whole[:, :width] = call["block_tables"]
    call["block_tables"] = whole[:, :width]


@_plant("token-slots-for-pages", DECODE)
def _slots(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """The pool's token slots where page ids are wanted."""
    page = call["kv_cache"][0].shape[-2]
    call["block_tables"] = _copy(call["block_tables"] * page, allocate, "slots")


@_plant("rounded-batch", DECODE)
def _rounded_batch(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """A query length that does not divide the rows: the library rounds the batch down."""
    call["q_len_per_req"] = step.q_len + 1


@_plant("uneven-queries", DECODE)
def _uneven_queries(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """Requests of q_len - 1 and q_len + 1 queries, one after the other, called with one q_len for all.

    Rows 0 .. q_len - 2 are the first request's; its last query is given to the second, ahead of its own.
    """
    q_len, query = step.q_len, call["query"]
    uneven = _copy(query, allocate, "uneven_q")
    if step.batch_size > 1 and q_len > 1:
        uneven[q_len - 1 : 2 * q_len - 1] = query[q_len : 2 * q_len]
        uneven[2 * q_len - 1] = query[q_len - 1]
    call["query"] = uneven


@_plant("uneven-offsets", RAGGED, CONTEXT)
def _uneven_offsets(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """Offsets of the accepted tokens for queries that are padded to the draft's length."""
    offsets = _copy(call["cum_seq_lens_q"], allocate, "uneven_offsets")
    offsets[1:-1] -= 1
    call["cum_seq_lens_q"] = offsets


@_plant("kv-offsets-in-pages", CONTEXT)
def _kv_offsets_in_pages(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """Not a mistake: with paged KV vLLM passes pages where SGLang passes tokens."""
    page = call["kv_cache"][0].shape[-2]
    offsets = torch.zeros_like(call["cum_seq_lens_kv"])
    offsets[1:] = torch.cumsum((call["seq_lens"] + page - 1) // page, 0)
    call["cum_seq_lens_kv"] = _copy(offsets, allocate, "page_offsets")


@_plant("short-bound", DECODE, RAGGED)
def _short_bound(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """The longest request of an early step, kept as the bound of later ones."""
    call["max_seq_len"] = 32


@_plant("spread-values", DECODE, CONTEXT)
def _spread_values(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """V in a pool of its own, its pages further apart than K's: K's strides are used for both."""
    k, v = call["kv_cache"]
    call["kv_cache"] = (k, _spread(v, allocate, "v_cache"))


@_plant("meaningless-stride", DECODE, CONTEXT)
def _meaningless_stride(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """One KV head, and its stride what slicing left: a TMA descriptor is made of it all the same."""
    k, v = call["kv_cache"]
    if k.shape[1] == 1:
        k, v = (pool.as_strided(pool.shape, (pool.stride(0), 7, *pool.stride()[2:])) for pool in (k, v))
    call["kv_cache"] = (k, v)


@_plant("key-scale-left-out", DECODE, RAGGED, CONTEXT)
def _key_scale_left_out(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """The softmax scale alone as bmm1_scale."""
    call["bmm1_scale"] = float(step.sm_scale)


@_plant("value-scale-left-out", DECODE, CONTEXT)
def _value_scale_left_out(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    call["bmm2_scale"] = 1.0


@_plant("sinks-left-out", DECODE, CONTEXT)
def _sinks_left_out(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    call["sinks"] = None


@_plant("swapped-block-scales", DECODE, CONTEXT)
def _swapped_block_scales(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    k, v = call["kv_cache_sf"]
    call["kv_cache_sf"] = (v, k)


@_plant("linear-value-scales", DECODE, CONTEXT)
def _linear_value_scales(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """V's block scales as they come, token by token, where the kernel wants them interleaved by four."""
    k, v = call["kv_cache_sf"]
    pages, heads, page, count = v.shape
    groups = v.view(torch.uint8).reshape(pages, heads, page // 4, count, 4).transpose(3, 4)
    linear = _copy(groups.reshape(pages, heads, page, count), allocate, "v_block_scales")
    call["kv_cache_sf"] = (k, linear.view(torch.float8_e4m3fn))


@_plant("spread-value-scales", DECODE, CONTEXT)
def _spread_value_scales(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """V's block scales further apart than K's: the kernel's descriptor of V's has K's strides."""
    k, v = call["kv_cache_sf"]
    call["kv_cache_sf"] = (k, _spread(v, allocate, "v_block_scales"))


@_plant("dirty-counters", DECODE, RAGGED)
def _dirty_counters(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """Counters left at one by a launch that was aborted: a request is merged before its last part is."""
    call["multi_ctas_kv_counter_buffer"].view(torch.int32).fill_(1)


@_plant("counters-never-zeroed", DECODE)
def _counters_never_zeroed(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """A buffer from ``torch.empty``: nobody finds the number at which to merge."""
    old = call["multi_ctas_kv_counter_buffer"]
    call["multi_ctas_kv_counter_buffer"] = allocate("counters", tuple(old.shape), old.dtype)


@_plant("small-counters", DECODE)
def _small_counters(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """Sized for the requests, not for the SMs."""
    call["multi_ctas_kv_counter_buffer"] = call["multi_ctas_kv_counter_buffer"][:32]


@_plant("no-such-kernel", DECODE, CONTEXT)
def _no_such_kernel(call: dict[str, Any], step: Step, allocate: Allocate) -> None:
    """Not a mistake: the library lacks a kernel for the shape, and says so before it launches anything."""
    raise RuntimeError("Missing TRTLLM-GEN kernel (decode): qkvLayout=PagedKv, headDimQk=128")
