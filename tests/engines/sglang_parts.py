"""SGLang's ``trtllm_mha`` backend without a GPU: the real module from an unpacked wheel, or a stand-in of it.

The real one is loaded from ``site`` with everything that it imports of SGLang replaced by what is here,
except the plugin framework (``sglang.srt.plugins``), the pool view (``mem_cache.layout.paged_view``) and the
enumeration ``ForwardMode``, which are SGLang's own. The two Triton kernels that fill metadata are replaced by
the same in torch.
"""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from autotune.engines.sglang import CLASS, MODULE
from autotune.routes.flashinfer.layout import canonical

REAL = (
    "sglang.srt.plugins",
    "sglang.srt.plugins.hook_registry",
    "sglang.srt.mem_cache.layout.paged_view",
    MODULE,
)
PAGE, CONTEXT, Q_LEN, HEADS, DIM = 64, 512, 4, 8, 128


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class Mode(enum.Enum):
    """The stand-in's ``ForwardMode``."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is Mode.DRAFT_EXTEND_V2

    def is_decode_or_idle(self) -> bool:
        return self in (Mode.DECODE, Mode.IDLE)


@dataclass
class Metadata:
    """The stand-in's ``TRTLLMMHAMetadata``, as far as a verify fills it."""

    cache_seqlens_int32: Any = None
    max_seq_len_q: int = 1
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    page_table: Any = None
    is_ragged_verify: bool = False
    fmha_v2_block_tables: dict[Any, Any] | None = None


def fill_table(
    *, req_to_token: Any, req_pool_indices: Any, cache_seqlens: Any, page_table: Any, page_size: int, **_: Any
) -> None:
    """What SGLang's kernel writes: page ids of the live pages of each row."""
    for row, request in enumerate(req_pool_indices.tolist()):
        live = -(-int(cache_seqlens[row]) // page_size)
        page_table[row, :live] = req_to_token[request, : live * page_size : page_size] // page_size


def fill_graph_metadata(
    *,
    req_pool_indices: Any,
    seq_lens: Any,
    req_to_token: Any,
    cache_seqlens: Any,
    cu_seqlens_k: Any,
    page_table: Any,
    bs: int,
    seqlen_offset: int,
    page_size: int,
    cu_seqlens_q: Any = None,
    q_stride: int = 0,
    **_: Any,
) -> None:
    """What the fused kernel of a captured forward rewrites, in place."""
    cache_seqlens.copy_((seq_lens + seqlen_offset).to(torch.int32))
    cu_seqlens_k[1:].copy_(cache_seqlens.cumsum(0))
    if cu_seqlens_q is not None:
        cu_seqlens_q.copy_(torch.arange(0, bs * q_stride + 1, q_stride))
    fill_table(
        req_to_token=req_to_token,
        req_pool_indices=req_pool_indices,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        page_size=page_size,
    )


class StandIn:
    """A backend that decides as SGLang's does: the decode kernel for verify, fmha-v2 for extends."""

    def _metadata(self: Any, batch: Any) -> Metadata:
        offset = Q_LEN if batch.forward_mode.is_target_verify() else 0
        lens = (batch.seq_lens + offset).to(torch.int32)
        size = batch.batch_size
        table = torch.zeros((size, self.max_num_pages), dtype=torch.int32)
        fill_table(
            req_to_token=self.req_to_token,
            req_pool_indices=batch.req_pool_indices,
            cache_seqlens=lens,
            page_table=table,
            page_size=self.page_size,
        )
        cumulative = torch.zeros(size + 1, dtype=torch.int32)
        cumulative[1:] = lens.cumsum(0)
        q = torch.arange(0, size * Q_LEN + 1, Q_LEN, dtype=torch.int32)
        return Metadata(lens, Q_LEN, q, cumulative, table)

    def init_forward_metadata(self: Any, forward_batch: Any) -> None:
        self.forward_metadata = self._metadata(forward_batch)

    def init_forward_metadata_out_graph(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
        kept = self.target_verify_metadata
        if in_capture:
            kept[forward_batch.batch_size] = self._metadata(forward_batch)
        self.forward_metadata = kept[forward_batch.batch_size]

    def init_forward_metadata_in_graph(self: Any, forward_batch: Any) -> None:
        metadata = self.target_verify_metadata[forward_batch.batch_size]
        fill_graph_metadata(
            req_pool_indices=forward_batch.req_pool_indices,
            seq_lens=forward_batch.seq_lens,
            req_to_token=self.req_to_token,
            cache_seqlens=metadata.cache_seqlens_int32,
            cu_seqlens_k=metadata.cu_seqlens_k,
            page_table=metadata.page_table,
            bs=forward_batch.batch_size,
            seqlen_offset=Q_LEN,
            page_size=self.page_size,
        )
        self.forward_metadata = metadata

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _get_bmm_scales(self, layer: Any, q_scale: float = 1.0) -> tuple[float, float]:
        return layer.scaling, 1.0

    def _get_layer_page_table(self: Any, layer: Any, forward_batch: Any) -> Any:
        return self.forward_metadata.page_table

    def forward_extend(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        flashinfer = sys.modules["flashinfer"]
        metadata, mode = self.forward_metadata, forward_batch.forward_mode
        query = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        pool = [
            half.view(-1, self.page_size, 1, layer.head_dim)
            for half in self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        ]
        shared = {
            "workspace_buffer": self.workspace_buffer,
            "seq_lens": metadata.cache_seqlens_int32,
            "bmm1_scale": layer.scaling,
            "bmm2_scale": 1.0,
        }
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            out = flashinfer.decode.trtllm_batch_decode_with_kv_cache(
                query=query,
                kv_cache=tuple(canonical(half.permute(0, 2, 1, 3)) for half in pool),
                block_tables=metadata.page_table,
                max_seq_len=self.max_context_len,
                q_len_per_req=metadata.max_seq_len_q,
                **shared,
            )
        else:
            # as SGLang does: what the first layer of a forward expands is remembered for the others
            delta = (pool[1].data_ptr() - pool[0].data_ptr()) // (pool[0].stride(0) * pool[0].element_size())
            kept = metadata.fmha_v2_block_tables
            if kept is None:
                kept = metadata.fmha_v2_block_tables = {}
            key = (metadata.page_table.data_ptr(), delta)
            if key not in kept:
                kept[key] = torch.stack([metadata.page_table, metadata.page_table + delta], dim=1)
            out = flashinfer.prefill.trtllm_fmha_v2_prefill(
                (query, tuple(pool)),
                input_layout="Q_PAGED_KV_NHD",
                max_q_len=metadata.max_seq_len_q,
                max_kv_len=self.max_context_len,
                batch_size=forward_batch.batch_size,
                cum_seq_lens_q=metadata.cu_seqlens_q,
                cum_seq_lens_kv=metadata.cu_seqlens_k,
                block_tables=kept[key],
                out=None,
                **shared,
            )
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)


class _Stub(types.ModuleType):
    """A module of SGLang of which only names are asked: each is a class of that name, unless it is set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Setting:
    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(get=lambda: None, is_set=lambda: False)


def _enumeration(site: Path) -> Any:
    """SGLang's own ``ForwardMode``, without the rest of its module."""
    source = (site / "sglang/srt/model_executor/forward_batch_info.py").read_text("utf-8")
    node = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "ForwardMode"
    )
    space: dict[str, Any] = {"IntEnum": enum.IntEnum, "auto": enum.auto, "Enum": enum.Enum}
    exec(compile(ast.Module([node], []), "forward_batch_info.py", "exec"), space)
    return space["ForwardMode"]


@contextmanager
def real(site: Path) -> Iterator[types.ModuleType]:
    """The real backend's module from ``site``; every ``sglang`` module goes when it ends."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "sglang"}
    for name in before:
        del sys.modules[name]

    class Finder:
        """Real files for :data:`REAL`, stubs for the rest."""

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name.split(".")[0] != "sglang":
                return None
            if name in REAL:
                base = site / Path(*name.split("."))
                file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
                inner = [str(base)] if base.is_dir() else None
                return importlib.util.spec_from_file_location(name, file, submodule_search_locations=inner)
            return importlib.util.spec_from_loader(name, finder, is_package=True)

        def create_module(self, spec: Any) -> types.ModuleType:
            return _Stub(spec.name)

        def exec_module(self, module: types.ModuleType) -> None:
            return None

    finder: Any = Finder()
    sys.meta_path.insert(0, finder)
    try:

        def stub(name: str, **values: Any) -> None:
            module = importlib.import_module(name)
            for key, value in values.items():
                setattr(module, key, value)

        stub("sglang.srt.environ", envs=_Setting())
        stub("sglang.srt.utils", is_flashinfer_available=lambda: True)
        stub("sglang.kernels.ops.attention.utils", canonicalize_stride=canonical)
        stub("sglang.kernels.ops.attention.trtllm_mha_page_table", build_trtllm_mha_page_table=fill_table)
        stub(
            "sglang.kernels.ops.attention.trtllm_mha_graph_metadata",
            update_trtllm_mha_graph_metadata=fill_graph_metadata,
            Q_MODE_NONE=0,
            Q_MODE_STRIDED=1,
        )
        stub("sglang.srt.layers.cp.base", get_cp_strategy=lambda: None)
        stub("sglang.srt.layers.cp.utils", is_cp_active=lambda batch: False)
        stub("sglang.srt.layers.radix_attention", AttentionType=AttentionType)
        stub("sglang.srt.model_executor.forward_batch_info", ForwardMode=_enumeration(site))
        stub(
            "sglang.srt.mem_cache.memory_pool",
            KVWriteLoc=SimpleNamespace(for_batch=lambda batch, swa_loc: swa_loc),
        )
        stub("sglang.srt.speculative.ragged_verify", resolve_ragged_verify_layout=lambda batch: None)
        yield importlib.import_module(MODULE)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)


@contextmanager
def stand_in() -> Iterator[types.ModuleType]:
    """The stand-in under the real module's name, with a hook registry of the same calls."""
    registry: Any = types.ModuleType("sglang.srt.plugins.hook_registry")
    hooks: list[tuple[str, Any]] = []

    class HookType(enum.Enum):
        AROUND = "around"

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
            assert hook_type is HookType.AROUND
            hooks.append((target, hook))

        @classmethod
        def apply_hooks(cls) -> None:
            import functools

            for target, hook in hooks:
                name = target.rsplit(".", 1)[1]
                original = getattr(module.TRTLLMHAAttnBackend, name)

                def wrapper(*args: Any, _hook: Any = hook, _original: Any = original, **kwargs: Any) -> Any:
                    return _hook(_original, *args, **kwargs)

                setattr(module.TRTLLMHAAttnBackend, name, functools.wraps(original)(wrapper))
            hooks.clear()

    registry.HookRegistry, registry.HookType = HookRegistry, HookType
    module: Any = types.ModuleType(MODULE)
    setattr(module, CLASS, type(CLASS, (StandIn,), {}))
    module.ForwardMode, module.get_cp_strategy = Mode, lambda: None
    names = [".".join(MODULE.split(".")[:at]) for at in range(1, 6)]
    made: dict[str, Any] = {name: types.ModuleType(name) for name in [*names, "sglang.srt.plugins"]}
    made |= {MODULE: module, registry.__name__: registry}
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield module
    finally:
        for name, kept in before.items():
            if kept is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = kept


class Pool:
    """K and V as halves of one allocation, a row per slot; ``fused=False``: two allocations."""

    def __init__(self, pages: int, *, fused: bool = True) -> None:
        generator = torch.Generator().manual_seed(3)
        both = torch.randn((2, pages * PAGE, 1, DIM), generator=generator).to(torch.bfloat16)
        self.k, self.v = both.unbind(0) if fused else (both[0].clone(), both[1].clone())
        self.written = 0

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        return self.k, self.v

    def set_kv_buffer(self, *args: Any) -> None:
        self.written += 1


@dataclass
class Layer:
    """The attributes of ``RadixAttention`` that the backend reads."""

    layer_id: int
    tp_q_head_num: int = HEADS
    tp_k_head_num: int = 1
    tp_v_head_num: int = 1
    head_dim: int = DIM
    v_head_dim: int = DIM
    scaling: float = DIM**-0.5
    sliding_window_size: int = -1
    logit_cap: float = 0.0
    attn_type: Any = AttentionType.DECODER
    is_cross_attention: bool = False
    k_scale: Any = None
    v_scale: Any = None


@dataclass
class Batch:
    """A ``ForwardBatch`` of a speculative step."""

    forward_mode: Any
    seq_lens: torch.Tensor
    batch_size: int = 0
    spec_info: Any = None
    out_cache_loc: Any = None
    _attn_output: Any = None
    seq_lens_sum: Any = None
    seq_lens_cpu: Any = None
    kv_loc_plan: Any = None
    extend_prefix_lens_cpu: Any = None
    input_ids: Any = None
    req_pool_indices: Any = None
    extend_seq_lens: Any = None
    extend_seq_lens_cpu: Any = None
    positions: Any = field(default=None)

    def __post_init__(self) -> None:
        size = self.batch_size = len(self.seq_lens)
        self.req_pool_indices = torch.arange(size)
        self.input_ids = self.positions = torch.zeros(size * Q_LEN, dtype=torch.int64)
        self.extend_seq_lens_cpu = [Q_LEN] * size
        self.extend_seq_lens = torch.full((size,), Q_LEN)
        self.spec_info = SimpleNamespace(num_tokens_per_req=Q_LEN, ragged_verify_layout=None)


def backend_of(module: Any, workspace: torch.Tensor, mask: torch.Tensor, *, fused: bool = True) -> Any:
    """An instance on SM90, as ``__init__`` leaves it, without a model runner."""
    cls = getattr(module, CLASS)
    backend = object.__new__(cls)
    most, width = 16, CONTEXT // PAGE
    slots = torch.randperm(most * width, generator=torch.Generator().manual_seed(5)).view(most, width)
    to_token = (slots[:, :, None] * PAGE + torch.arange(PAGE)).view(most, CONTEXT)
    vars(backend).update(
        is_xqa_impl=True,
        use_fmha_v2=True,
        is_nvfp4_kvcache=False,
        uses_trtllm_gen_native_fp4=False,
        decode_seq_len_splits=1,
        data_type=torch.bfloat16,
        q_data_type=torch.bfloat16,
        page_size=PAGE,
        max_context_len=CONTEXT,
        max_num_pages=width,
        device="cpu",
        req_to_token=to_token,
        speculative_num_draft_tokens=Q_LEN,
        speculative_step_id=0,
        expand_encoder_only_verify=False,
        use_sliding_window_kv_pool=False,
        _swa_kv_pool=None,
        _swa_full_to_swa_mapping=None,
        workspace_buffer=workspace,
        fmha_v2_workspace_buffer=workspace,
        _multi_ctas_kv_counter_buffer=None,
        _xqa_spec_dec_mask=mask,
        forward_metadata=None,
        token_to_kv_pool=Pool(most * width, fused=fused),
        _kv_write_scales=lambda layer: (),
        kv_index_translator=SimpleNamespace(
            is_translating=False, read_table=lambda plan, rows: SimpleNamespace(is_translated=False)
        ),
        target_verify_metadata={},
    )
    if hasattr(cls, "init_cuda_graph_state"):
        backend.init_cuda_graph_state(most, most * Q_LEN)
    return backend
