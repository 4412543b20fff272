"""A FlashInfer that computes attention in fp32 on the CPU, with the library's call signatures.

Decode and context kernels are the same mathematics here; each writes down that it was called. A table that is
narrower than a request's lengths is an :class:`IllegalAccessError`, as is any page outside the pool.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKSPACE = torch.empty(512 * 2**20, dtype=torch.uint8)  # never touched: no page of it becomes resident


class IllegalAccessError(RuntimeError):
    """What the CUDA runtime says of it."""

    def __init__(self) -> None:
        super().__init__("CUDA error: an illegal memory access was encountered")


class Library:
    """The stand-in: ``calls`` has (function, arguments) in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fail: dict[str, BaseException] = {}

    @property
    def called(self) -> list[str]:
        return [name for name, _ in self.calls]

    def _begin(self, name: str, arguments: dict[str, Any]) -> None:
        self.calls.append((name, arguments))
        if name in self.fail:
            raise self.fail[name]

    def decode(
        self,
        query: torch.Tensor,
        kv_cache: Any,
        workspace_buffer: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        bmm1_scale: float = 1.0,
        bmm2_scale: float = 1.0,
        window_left: int = -1,
        out: torch.Tensor | None = None,
        out_dtype: Any = None,
        sinks: Any = None,
        kv_layout: str = "HND",
        enable_pdl: bool | None = None,
        backend: str = "auto",
        q_len_per_req: int | None = 1,
        mask: torch.Tensor | None = None,
        max_q_len: int | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._begin("decode", dict(locals()))
        assert q_len_per_req is not None
        k, v = kv_cache if isinstance(kv_cache, tuple) else kv_cache.unbind(1)
        if kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        # what a decode kernel is told to reach, whatever the lengths say
        if block_tables.shape[1] * k.shape[1] < max_seq_len and bool(seq_lens.max() % k.shape[1] == 0):
            raise IllegalAccessError
        return attend(query, k, v, block_tables, seq_lens, bmm1_scale, out, q_len_per_req)

    def context(self, **call: Any) -> torch.Tensor:
        self._begin("context", call)
        k, v = (half.transpose(1, 2) for half in call["kv_cache"])
        return attend(
            call["query"],
            k,
            v,
            call["block_tables"],
            call["seq_lens"],
            call["bmm1_scale"],
            call["out"],
            call["max_q_len"],
        )

    def fmha_v2(self, qkv: Any, **call: Any) -> torch.Tensor:
        self._begin("fmha_v2", {"qkv": qkv, **call})
        query, (k, v) = qkv
        assert call["input_layout"] == "Q_PAGED_KV_NHD"
        table = call["block_tables"]
        delta = (v.data_ptr() - k.data_ptr()) // (k.stride(0) * k.element_size())
        assert torch.equal(table[:, 1], table[:, 0] + delta)
        batch, q_len = call["batch_size"], call["max_q_len"]
        assert call["cum_seq_lens_q"].tolist() == [q_len * row for row in range(batch + 1)]
        assert call["cum_seq_lens_kv"].tolist() == [0, *call["seq_lens"].cumsum(0).tolist()]
        return attend(query, k, v, table[:, 0], call["seq_lens"], call["bmm1_scale"], call["out"], q_len)


def attend(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None,
    q_len: int,
) -> torch.Tensor:
    """Causal attention, K and V [pages, page_size, heads, head_dim]."""
    page, group = k.shape[1], query.shape[1] // k.shape[2]
    made = torch.zeros_like(query) if out is None else out
    for row, kv_len in enumerate(seq_lens.tolist()):
        live = -(-kv_len // page)
        if live > table.shape[1]:
            raise IllegalAccessError
        ids = table[row, :live].tolist()
        if any(not 0 <= number < k.shape[0] for number in ids):
            raise IllegalAccessError
        keys = torch.cat([k[number] for number in ids])[:kv_len].float().repeat_interleave(group, 1)
        values = torch.cat([v[number] for number in ids])[:kv_len].float().repeat_interleave(group, 1)
        q = query[row * q_len : (row + 1) * q_len].float()
        logits = torch.einsum("qhd,khd->hqk", q, keys) * scale
        seen = torch.arange(kv_len)[None] <= torch.arange(kv_len - q_len, kv_len)[:, None]
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        answer = torch.einsum("hqk,khd->qhd", weights, values)
        made[row * q_len : (row + 1) * q_len] = answer.to(made.dtype)
    return made


@contextmanager
def installed() -> Iterator[Library]:
    """``import flashinfer`` finds the stand-in inside; what was there before comes back."""
    library = Library()
    root: Any = types.ModuleType("flashinfer")
    decode: Any = types.ModuleType("flashinfer.decode")
    prefill: Any = types.ModuleType("flashinfer.prefill")

    def trtllm_batch_decode_with_kv_cache(*args: Any, **kwargs: Any) -> torch.Tensor:
        return library.decode(*args, **kwargs)

    import functools

    function = functools.wraps(library.decode)(trtllm_batch_decode_with_kv_cache)
    decode.trtllm_batch_decode_with_kv_cache = root.trtllm_batch_decode_with_kv_cache = function
    prefill.trtllm_batch_context_with_kv_cache = library.context
    prefill.trtllm_fmha_v2_prefill = library.fmha_v2
    root.decode, root.prefill = decode, prefill
    names = {"flashinfer": root, "flashinfer.decode": decode, "flashinfer.prefill": prefill}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield library
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def causal_mask(batch: int, q_len: int) -> torch.Tensor:
    """uint16 [batch, q_len, 2], as XQA takes it."""
    words = [[((2 << row) - 1) & 0xFFFF, 0] for row in range(q_len)]
    return torch.tensor(words, dtype=torch.int32).to(torch.uint16).expand(batch, q_len, 2).contiguous()


def decode_call(
    lens: tuple[int, ...], *, q_len: int = 4, max_context: int = 512, page: int = 64, seed: int = 0
) -> dict[str, Any]:
    """A right decode call, as SGLang makes it: fused pool, HND views, a table as wide as the context."""
    generator = torch.Generator().manual_seed(seed)
    batch, width = len(lens), -(-max_context // page)
    pages = batch * width + 1
    pool = torch.randn((2, pages, page, 1, 128), generator=generator).to(torch.bfloat16)
    k, v = pool.unbind(0)
    table = torch.randperm(pages - 1, generator=generator)[: batch * width].view(batch, width)
    query = torch.randn((batch * q_len, 8, 128), generator=generator).to(torch.bfloat16)
    return {
        "query": query,
        "kv_cache": tuple(_canonical(half.permute(0, 2, 1, 3)) for half in (k, v)),
        "workspace_buffer": WORKSPACE,
        "block_tables": table.to(torch.int32).contiguous(),
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "max_seq_len": max_context,
        "bmm1_scale": 128**-0.5,
        "bmm2_scale": 1.0,
        "window_left": -1,
        "sinks": None,
        "out": None,
        "out_dtype": torch.bfloat16,
        "kv_cache_sf": None,
        "q_len_per_req": q_len,
        "mask": causal_mask(batch, q_len),
    }


def _canonical(tensor: torch.Tensor) -> torch.Tensor:
    from autotune.routes.flashinfer.layout import canonical

    return canonical(tensor)
