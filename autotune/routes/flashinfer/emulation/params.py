"""What the C++ launcher derives from its arguments, and what it refuses.

Line for line ``trtllm_paged_attention_decode`` / ``_context`` / ``_launcher`` of
``csrc/trtllm_fmha_kernel_launcher.cu`` and the TMA descriptors of ``trtllm/fmha/kernelParams.h``, for paged
KV without MLA. From here on there are addresses and numbers only.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autotune.routes.flashinfer.emulation.arguments import LauncherError

if TYPE_CHECKING:
    from autotune.routes.flashinfer.emulation.arguments import Launch

_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
LOG2E = 1.4426950408889634
# Tokens of KV that one step of a generation kernel takes; a split has two steps at least.
STEP_KV = 128
# TMA: addresses and all strides but the innermost are multiples of this many bytes.
TMA_BYTES = 16


@dataclass(frozen=True, slots=True)
class Scales:
    """NVFP4 block scales: addresses, and the strides that both are read with, in bytes (an e4m3 each)."""

    k: int
    v: int
    stride_heads: int
    stride_pages: int


@dataclass(frozen=True, slots=True)
class Params:
    """A launch in addresses, element strides and host values.

    Attributes:
        kv_dtype: ``uint8`` for NVFP4: strides below are then in bytes, two elements each.
        k, v, q, out, tables, seq_lens, cum_q, cum_kv, sinks: addresses; 0 where there is none.
        stride_tokens, stride_heads, stride_pages: K's, used for V too.
        window: tokens that a query sees, itself included; None: all before it.
        scale_log2, output_scale: what q.k and the result are multiplied with; exponents are powers of two.
        splits: parts of the KV that a decode launch works on at once; 1: no counters, no scratch.
    """

    context: bool
    causal: bool
    batch: int
    max_q_len: int
    max_kv_len: int
    rows: int
    qo_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    out_dtype: torch.dtype
    q: int
    k: int
    v: int
    out: int
    tables: int
    table_width: int
    seq_lens: int
    cum_q: int
    cum_kv: int
    sinks: int
    scratch: int
    counters: int
    q_stride_tokens: int
    q_stride_heads: int
    stride_tokens: int
    stride_heads: int
    stride_pages: int
    block_scales: Scales | None
    window: int | None
    scale_log2: float | int
    scale_log2_at: int
    output_scale: float
    output_scale_at: int
    splits: int

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.qo_heads // self.kv_heads


def _int32(value: int) -> int:
    """What a C++ ``int`` keeps of an int64."""
    return ctypes.c_int32(value).value


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise LauncherError(text)


def counter_bytes(batch: int, qo_heads: int, sm_count: int) -> int:
    """``getTrtllmGenMultiCtasKvCounterBytes``."""
    return -(-max(batch * qo_heads, sm_count) // 8) * 8 * 4


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _scale(value: Any) -> tuple[float, int]:
    """A scale's host value, and the address of its device value (0: none)."""
    if isinstance(value, torch.Tensor):
        return 1.0, value.data_ptr()
    return float(value), 0


def _descriptor(what: str, address: int, strides: tuple[int, ...], size: int) -> None:
    """What ``buildNdTmaDescriptor`` refuses; strides in elements of ``size`` bytes, innermost left out."""
    bad = [stride * size for stride in strides if stride * size % TMA_BYTES]
    _check(
        address % TMA_BYTES == 0 and not bad,
        f"failed to initialise the TMA descriptor of {what}: address {address:#x} and strides "
        f"{[stride * size for stride in strides]} bytes must be multiples of {TMA_BYTES}",
    )


def splits(batch: int, kv_heads: int, max_q_len: int, max_kv_len: int, sm_count: int) -> int:
    """Parts of the KV in a decode launch: as many as fill the SMs, each of two steps at least.

    ``computeCtaAndClusterConfig`` with one CTA for each request, KV head and query.
    """
    most = -(-max_kv_len // (2 * STEP_KV))
    return max(1, min(most, sm_count // max(1, batch * kv_heads * max_q_len)))


def derive(launch: Launch) -> Params:
    """The launch as the kernel gets it.

    Raises:
        LauncherError: as the launcher would raise.
    """
    given, context = launch.given, launch.context
    q, k, v, out = given.query, given.key_cache, given.value_cache, given.out
    _check(k.dim() == v.dim(), f"K has {k.dim()} dimensions, V {v.dim()}")
    if not context:
        _check(k.shape == v.shape, f"K has shape {tuple(k.shape)}, V {tuple(v.shape)}")
    packed = k.dtype == torch.uint8
    for name, tensor in (("query", q), ("out", out), *(() if packed else (("key_cache", k),))):
        _check(tensor.dtype in _DTYPES, f"{name} in {tensor.dtype} is not emulated")
    head_dim, factor = k.shape[-1] * (2 if packed else 1), 2 if packed else 1
    for what, found in (
        ("query", q.shape[-1]),
        ("V", v.shape[-1] * factor),
        ("out", out.shape[-1]),
    ):
        _check(found == head_dim, f"head_dim of K is {head_dim}, of {what} {found}")
    qo_heads, kv_heads, page_size = q.shape[1], k.shape[-3], k.shape[-2]
    _check(qo_heads % kv_heads == 0, f"{qo_heads} query heads are no multiple of {kv_heads} KV heads")
    _check(page_size & (page_size - 1) == 0, f"a page of {page_size} tokens is no power of two")
    _check(
        not context or given.is_causal or given.window_left == -1,
        "sliding-window non-causal attention is not supported",
    )
    block_scales = _block_scales(given, head_dim, page_size) if packed else None
    if given.attention_sinks is not None:
        _check(given.attention_sinks.dtype == torch.float32, "attention_sinks must be a float tensor")

    counters, parts = 0, 1
    if not context:
        counters = given.multi_ctas_kv_counter_buffer.data_ptr()
        held = given.multi_ctas_kv_counter_buffer.numel() * given.multi_ctas_kv_counter_buffer.element_size()
        needed = counter_bytes(given.batch_size, qo_heads, given.sm_count)
        _check(counters % 16 == 0, "the multi-CTA KV counter buffer must be 16-byte aligned")
        _check(held >= needed, f"the counter buffer is too small: {held} bytes, needed are {needed}")
        parts = splits(given.batch_size, kv_heads, given.max_q_len, given.max_kv_len, given.sm_count)
    # Strides become ints there, twice K's for FP4 and halved again in the descriptor.
    stride_tokens, stride_heads, stride_pages = (
        _int32(k.stride(dim) * factor) // factor for dim in (-2, -3, 0)
    )
    _descriptor("Q", q.data_ptr(), (q.stride(1), q.stride(0)), q.element_size())
    for what, tensor in (("K", k), ("V", v)):
        _descriptor(
            what, tensor.data_ptr(), (stride_tokens, stride_heads, stride_pages), tensor.element_size()
        )
    _descriptor("O", out.data_ptr(), (head_dim,), out.element_size())
    bmm1, bmm1_at = _scale(given.bmm1_scale)
    bmm2, bmm2_at = _scale(given.bmm2_scale)
    return Params(
        context=context,
        causal=bool(given.is_causal) if context else True,
        batch=given.batch_size,
        max_q_len=given.max_q_len,
        max_kv_len=given.max_kv_len,
        rows=q.shape[0],
        qo_heads=qo_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        q_dtype=q.dtype,
        kv_dtype=k.dtype,
        out_dtype=out.dtype,
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        out=out.data_ptr(),
        tables=given.block_tables.data_ptr(),
        table_width=given.block_tables.shape[-1],
        seq_lens=given.seq_lens.data_ptr(),
        cum_q=_address(given.cum_seq_lens_q),
        cum_kv=_address(given.cum_seq_lens_kv) if context else 0,
        sinks=_address(given.attention_sinks),
        scratch=-(-given.workspace_buffer.data_ptr() // 16) * 16,
        counters=counters,
        q_stride_tokens=_int32(q.stride(0)),
        q_stride_heads=_int32(q.stride(1)),
        stride_tokens=stride_tokens,
        stride_heads=stride_heads,
        stride_pages=stride_pages,
        block_scales=block_scales,
        window=None if given.window_left == -1 else given.window_left + 1,
        scale_log2=bmm1 * LOG2E,
        scale_log2_at=bmm1_at,
        output_scale=bmm2,
        output_scale_at=bmm2_at,
        splits=parts,
    )


def _block_scales(given: Any, head_dim: int, page_size: int) -> Scales:
    """Of both, K's strides are used: ``setKernelParams`` builds V's descriptor from K's."""
    k, v = given.key_block_scales, given.value_block_scales
    _check(k is not None, "key_block_scales must be provided for FP4 kv cache")
    _check(v is not None, "value_block_scales must be provided for FP4 kv cache")
    _check(
        head_dim % 64 == 0 and page_size % 4 == 0,
        f"interleaved V scales need head_dim a multiple of 64 and pages of 4, not {head_dim} and {page_size}",
    )
    found = Scales(k.data_ptr(), v.data_ptr(), _int32(k.stride(-3)), _int32(k.stride(0)))
    for what, address in (("K scales", found.k), ("V scales", found.v)):
        _descriptor(what, address, (found.stride_heads, found.stride_pages), 1)
    return found
