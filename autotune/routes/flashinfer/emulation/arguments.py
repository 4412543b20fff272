"""The launchers' positional arguments by name.

The names are those of ``csrc/trtllm_fmha_kernel_launcher.cu``. 0.7 has ``lse_scale`` after ``lse``, which
0.6.18 has not: the number of arguments says which one called. Any other number is a launcher that this
emulation has not been written for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

_HEAD = (
    "out",
    "out_scale_factor",
    "query",
    "key_cache",
    "value_cache",
    "workspace_buffer",
    "multi_ctas_kv_counter_buffer",
    "block_tables",
    "seq_lens",
    "max_q_len",
    "max_kv_len",
    "bmm1_scale",
    "bmm2_scale",
    "o_sf_scale",
    "o_sf_vec_size",
    "o_sf_start_index",
    "batch_size",
    "window_left",
)
_DECODE = (
    *_HEAD,
    "sparse_mla_top_k",
    "sm_count",
    "enable_pdl",
    "workspace_size",
    "attention_sinks",
    "cum_seq_lens_q",
    "key_block_scales",
    "value_block_scales",
    "skip_softmax_threshold_scale_factor",
    "uses_shared_paged_kv_idx",
    "lse",
    "lse_scale",
    "lse_stride_tokens",
    "lse_stride_heads",
    "enable_block_sparse_attention",
    "sparse_mla_top_k_lens",
    "bf16q_fp8kv_transform_mode",
    "use_fp16_softmax",
)
_CONTEXT = (
    *_HEAD,
    "cum_seq_lens_q",
    "cum_seq_lens_kv",
    "sm_count",
    "enable_pdl",
    "workspace_size",
    "attention_sinks",
    "key_block_scales",
    "value_block_scales",
    "skip_softmax_threshold_scale_factor",
    "uses_shared_paged_kv_idx",
    "use_fp16_softmax",
    "uses_spcompress",
    "is_causal",
    "lse",
    "lse_scale",
    "lse_stride_tokens",
    "lse_stride_heads",
)


def _older(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name != "lse_scale")


# function -> the argument orders that are known, the newest first
ORDERS = {
    "trtllm_paged_attention_decode": (_DECODE, _older(_DECODE)),
    "trtllm_paged_attention_context": (_CONTEXT, _older(_CONTEXT)),
}
# What none of our routes asks for, and the values that say so.
_UNUSED: dict[str, tuple[Any, ...]] = {
    "out_scale_factor": (None,),
    "sparse_mla_top_k": (0,),
    "skip_softmax_threshold_scale_factor": (None, 0.0),
    "uses_shared_paged_kv_idx": (None, True),
    "lse": (None,),
    "enable_block_sparse_attention": (False,),
    "sparse_mla_top_k_lens": (None,),
    "use_fp16_softmax": (None, False),
    "uses_spcompress": (None, False),
}


class LauncherError(RuntimeError):
    """The launcher refuses its arguments: a Python exception on a GPU too, before anything is launched."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a launcher.

    Attributes:
        context: the context launcher, not the decode one.
        given: its arguments as attributes, each under its C++ name.
    """

    context: bool
    given: SimpleNamespace


def named(function: str, args: Sequence[Any]) -> Launch:
    """The call of ``function`` with ``args``.

    Raises:
        LauncherError: a launcher, a number of arguments or a feature that is not emulated.
    """
    if function not in ORDERS:
        raise LauncherError(f"{function} is not emulated, only {' and '.join(ORDERS)}")
    order = next((names for names in ORDERS[function] if len(names) == len(args)), None)
    if order is None:
        known = " or ".join(str(len(names)) for names in ORDERS[function])
        raise LauncherError(
            f"{function} was called with {len(args)} arguments; emulated are {known} (FlashInfer 0.7, 0.6.18)"
        )
    given = SimpleNamespace(**dict(zip(order, args, strict=True)))
    for name, neutral in _UNUSED.items():
        # `in` would compare tensors element by element
        if hasattr(given, name) and not any(
            getattr(given, name) is value or _equal(getattr(given, name), value) for value in neutral
        ):
            raise LauncherError(f"{function} was called with {name}, which is not emulated")
    return Launch(function == "trtllm_paged_attention_context", given)


def _equal(found: Any, value: Any) -> bool:
    return isinstance(found, (int, float)) and value is not None and found == value
