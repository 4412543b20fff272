"""The SGLang plugin (entry point ``sglang.srt.plugins``): SGLang's ``trtllm_mha`` backend, routed.

The backend sends target-verify and draft-extend to the decode kernel through ``forward_extend``. The hook
stands around that method, one level above the kernel call. To take the context route it presents the batch to
the engine's own code as an extend for the time of the call, so that the engine's context path, dtypes (an fp8
query), layouts and buffers apply; to take the decode route it leaves the call alone. What both paths need
(total lengths, cumulative lengths, page table) the engine's verify metadata have already, eager or captured.

One thing they do not have: ``fmha_v2_block_tables`` remembers expanded page tables for the layers of one
forward. Metadata of a captured size outlive the forward, so what the warm-up before a capture left there
would be frozen into the graph. The hooks around the metadata step drop it before every forward and every
capture.

Plain decode, mixed batches, ragged verify, encoder-only layers, context parallelism and NVFP4 caches are
never touched. ``fa2`` is never faked: this backend cannot plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.domain.cell import Column
from autotune.domain.dtypes import DTypes
from autotune.domain.shape import Shape
from autotune.engines.choice import NOT_DEPLOYABLE, Choice, Chooser
from autotune.engines.environment import Mode, Settings
from autotune.engines.log import Once, say, told
from autotune.engines.pool import dtype_name, layout_of
from autotune.engines.runtime import Runtime, capturing, deadly, entered, started
from autotune.routes.base import Capacity, Step
from autotune.routes.contract import Contract

if TYPE_CHECKING:
    import torch

MODULE = "sglang.srt.layers.attention.trtllm_mha_backend"
CLASS = "TRTLLMHAAttnBackend"
TARGET = f"{MODULE}.{CLASS}"
METADATA = ("init_forward_metadata", "init_forward_metadata_out_graph", "init_forward_metadata_in_graph")
# What the swap relies on; see ``outline``.
RELIED_ON = (
    "forward_extend",
    *METADATA,
    "_build_cuda_graph_metadata",
    "_apply_cuda_graph_metadata",
    "_fmha_v2_paged_inputs",
    "_get_bmm_scales",
    "_get_layer_page_table",
    "_should_use_fused_fp8_path",
    "get_cuda_graph_seq_len_fill_value",
)
# SGLang's version -> fingerprint of those methods.
KNOWN = {"0.5.23": "e06e52628758a660"}

# A server has tens of captured sizes and a few layer kinds.
_MOST_CONTRACTS = 4096
_STEP = "_autotune_step"
_STEPS = "_autotune_steps"


class _Step:
    """One (mode, batch size, q_len) of one backend: what its layers get, found out once."""

    __slots__ = ("batch", "choices", "mode", "q_len")

    def __init__(self, mode: Any, batch: int, q_len: int) -> None:
        self.mode, self.batch, self.q_len = mode, batch, q_len
        self.choices: dict[int, tuple[Choice, Chooser, Column]] = {}


class Plugin:
    """The hooks, and what they know. The runtime starts at the first speculative step: until then neither the
    device of this rank nor whether this process runs a model is known."""

    def __init__(self, begin: Callable[[], Runtime | None]) -> None:
        self._begin = begin
        self._begun = False
        self.runtime: Runtime | None = None
        self._once = Once()
        self._choosers: dict[tuple[Shape, DTypes, int], Chooser] = {}
        self._contracts: dict[tuple[str, int, int], tuple[Column, Contract]] = {}
        self._disabled = False
        self._generation = -1

    def metadata(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around the three methods that prepare a forward."""
        result = original(*args, **kwargs)
        try:
            backend = args[0]
            batch = args[1] if len(args) > 1 else kwargs["forward_batch"]
            in_capture = bool(kwargs.get("in_capture", args[2] if len(args) > 2 else False))
            name = getattr(original, "__name__", "")
            self._resolve(backend, batch, counted=name != METADATA[2] and not in_capture)
        except Exception as error:
            self._failed(error, "the metadata step")
            if args:
                vars(args[0]).pop(_STEP, None)
        return result

    def forward_extend(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around the attention of one layer."""
        step = getattr(args[0], _STEP, None) if args else None
        if step is None:
            return original(*args, **kwargs)
        choice = None
        try:
            choice = self._take_context(step, args, kwargs)
        except Exception as error:
            self._failed(error, "choosing a route")
        if choice is None:
            return self._stock(original, args, kwargs)
        batch = _argument(args, kwargs, 5, "forward_batch")
        mode = batch.forward_mode
        try:
            batch.forward_mode = type(mode).EXTEND
            return original(*args, **kwargs)
        except Exception as error:
            if self._saw(error):
                raise
            if choice.refuses_stock:
                where = f"q_len {step.q_len} batch {step.batch}"
                raise choice.refusal(_stock_name(args[0]), where, error) from error
            # the context path of this engine cannot do it: never again in this process
            self._disabled = True
            self._failed(error, "the engine's context path")
            self._replaced(step, args, kwargs)
        finally:
            batch.forward_mode = mode
        return self._stock(original, args, kwargs)

    def _replaced(self, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The engine's own kernel is about to run in the place of the one that was noted for this layer."""
        try:
            _, chooser, column = step.choices[_argument(args, kwargs, 4, "layer").layer_id]
            stock = _stock_name(args[0])
            if self.runtime is not None:
                self.runtime.calling(stock, str(column))
                if capturing():
                    self.runtime.recorded(chooser, step.batch, step.q_len, stock)
        except Exception as error:
            self._failed(error, "noting a replaced call")

    def _stock(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            self._saw(error)
            raise

    def _saw(self, error: BaseException) -> bool:
        return self.runtime.saw(error) if self.runtime is not None else deadly(error)

    def _failed(self, error: BaseException, where: str) -> None:
        self._once(where, f"sglang: {where}: {told(error)}; the engine's own path is taken")

    def _resolve(self, backend: Any, batch: Any, *, counted: bool) -> None:
        """What the layers of this forward will read: an attribute of the backend."""
        mode = batch.forward_mode
        vars(backend).pop(_STEP, None)
        if not (mode.is_target_verify() or mode.is_draft_extend_v2()):
            return
        if not self._begun:
            self._begun = True
            self.runtime = self._begin()
        runtime = self.runtime
        if runtime is None or not runtime.active:
            return
        metadata = backend.forward_metadata
        if metadata.is_ragged_verify or backend.is_nvfp4_kvcache or backend.decode_seq_len_splits != 1:
            return
        metadata.fmha_v2_block_tables = None
        size, q_len = int(batch.batch_size), int(metadata.max_seq_len_q)
        if runtime.router.generation != self._generation:  # another table, or none for now
            self._generation = runtime.router.generation
            self._choosers.clear()
            vars(backend).pop(_STEPS, None)
        # the generation is kept with the steps: another backend's may be of an older table
        generation, steps = vars(backend).setdefault(_STEPS, (self._generation, {}))
        if generation != self._generation:
            steps = {}
            setattr(backend, _STEPS, (self._generation, steps))
        step = steps.get((mode, size, q_len))
        if step is None:
            step = steps[mode, size, q_len] = _Step(mode, size, q_len)
        setattr(backend, _STEP, step)
        if counted and runtime.traffic is not None and size > 0:
            runtime.traffic.count(size, q_len, _longest(batch, q_len))

    def _take_context(self, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice | None:
        """Why this layer's call is to be presented as an extend; None: it is not."""
        runtime, backend = self.runtime, args[0]
        layer = _argument(args, kwargs, 4, "layer")
        batch = _argument(args, kwargs, 5, "forward_batch")
        if runtime is None or batch.forward_mode is not step.mode:
            return None
        if int(batch.batch_size) != step.batch:
            return None
        found = step.choices.get(layer.layer_id)
        if found is None:
            found = self._choose(step, backend, layer, batch, kwargs)
            if found is None:
                return None
            step.choices[layer.layer_id] = found
        choice = self._context(step, backend, layer, batch, found, args, kwargs)
        if runtime.mode is Mode.ROUTE and capturing():
            kernel = None if choice is None else choice.route
            runtime.recorded(found[1], step.batch, step.q_len, kernel or _stock_name(backend))
        return choice

    def _context(
        self,
        step: _Step,
        backend: Any,
        layer: Any,
        batch: Any,
        found: tuple[Choice, Chooser, Column],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Choice | None:
        """The choice of a context kernel, where this layer's call is to be presented to it; or None."""
        runtime = self.runtime
        if runtime is None:
            return None
        choice, chooser, column = found
        stock = _stock_name(backend)
        if choice.route is None and not choice.decided:
            runtime.note(choice, stock, column)
            return None
        query = _argument(args, kwargs, 1, "q")
        call = self._call(step, backend, layer, batch, query, kwargs)
        broken = self._broken(choice.route or stock, column, call)
        if broken is not None:
            refused = Choice(None, "contract", broken, decided=False)
            if choice.route is None:
                # the engine's own context path makes its own call of these metadata
                refused = chooser.refused(step.batch, step.q_len, broken)
                if refused.route is not None and self._broken(refused.route, column, call) is not None:
                    refused = Choice(None, "contract", broken, decided=False)
            choice = refused
        given = batch._attn_output
        if choice.moved and given is not None and given.numel() != query.numel():
            choice = Choice(None, NOT_DEPLOYABLE, "the output handed over has another size", decided=False)
        if self._disabled:
            choice = choice.left()
        runtime.note(choice, stock, column)
        if choice.route is None or runtime.mode is not Mode.ROUTE:
            return None
        return choice

    def _choose(
        self, step: _Step, backend: Any, layer: Any, batch: Any, kwargs: dict[str, Any]
    ) -> tuple[Choice, Chooser, Column] | None:
        runtime = self.runtime
        kv, q = dtype_name(backend.data_type), dtype_name(backend.q_data_type)
        attention = str(getattr(layer.attn_type, "name", layer.attn_type)).upper()
        if runtime is None or kv is None or q is None or attention != "DECODER" or layer.is_cross_attention:
            return None
        import sys

        if sys.modules[MODULE].get_cp_strategy() is not None:
            return None  # an extend would be spread over the ranks
        k, v = _pool(backend, layer)
        layout = layout_of(k, v)
        if layout is None:
            self._once(
                "layout",
                "sglang: nothing is routed: K and V lie in no pool that a table has "
                f"(strides {tuple(k.stride())} and {tuple(v.stride())})",
            )
            return None
        shape = Shape(
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.head_dim,
            backend.page_size,
            head_dim_vo=layer.v_head_dim,
            kv_layout=layout,
            window_left=int(layer.sliding_window_size),
            sinks=kwargs.get("sinks") is not None,
            soft_cap=float(layer.logit_cap or 0.0),
        )
        dtypes = DTypes(q, kv, q)
        context, pad = int(backend.max_context_len), int(backend.get_cuda_graph_seq_len_fill_value())
        key = (shape, dtypes, context)
        chooser = self._choosers.get(key)
        stock = _stock_name(backend)
        if chooser is None:
            context_kernel = "fmha-v2" if backend.use_fmha_v2 else "trtllm-gen-context"
            chooser = self._choosers[key] = runtime.chooser(
                shape,
                dtypes,
                max_context=context,
                stock=stock,
                fallback=context_kernel,
                deployable=frozenset({context_kernel}),
                pad_value=pad,
                q_lens=(step.q_len,),
            )
        choice = chooser.choose(step.batch, step.q_len)
        column = Column(shape, dtypes, step.q_len, step.batch, context, pad_value=pad)
        if runtime.mode is Mode.ROUTE and (choice.moved or choice.decided):
            called = choice.left() if self._disabled else choice
            runtime.calling(called.route or stock, str(column))
        return choice, chooser, column

    def _call(
        self, step: _Step, backend: Any, layer: Any, batch: Any, query: Any, kwargs: dict[str, Any]
    ) -> Step:
        """The call in the contract's words. Host values and views only."""
        k, v = _pool(backend, layer)
        bmm1, bmm2 = backend._get_bmm_scales(layer)
        return Step(
            q=query.view(-1, layer.tp_q_head_num, layer.head_dim),
            k=k,
            v=v,
            page_table=backend._get_layer_page_table(layer, batch),
            seq_lens=backend.forward_metadata.cache_seqlens_int32,
            host_kv_lens=None,
            q_len=step.q_len,
            sm_scale=float(layer.scaling),
            k_scale=float(bmm1) / float(layer.scaling),
            v_scale=float(bmm2),
            max_seq_len=int(backend.max_context_len),
            sinks=kwargs.get("sinks"),
        )

    def _broken(self, route: str, column: Column, step: Step) -> str | None:
        pages = int(step.k.shape[0])
        # by identity: the hash of a column is dear
        key = (route, id(column), pages)
        found = self._contracts.get(key)
        if found is None or found[0] is not column:
            if len(self._contracts) >= _MOST_CONTRACTS:
                self._contracts.clear()
            capacity = Capacity(column, column.batch_size, pages, step.q.device.type)
            made = Contract(capacity, route=route, pad_value=column.pad_value)
            found = self._contracts[key] = (column, made)
        error = found[1].broken(step)
        return None if error is None else str(error)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs[name]


def _stock_name(backend: Any) -> str:
    return "xqa-decode" if backend.is_xqa_impl else "trtllm-gen-decode"


def _pool(backend: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logical NHD views of a layer's pool: rows per slot, or [pages, heads, page_size, dim]."""
    k, v = backend.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    if k.dim() == 4:
        return k.transpose(1, 2), v.transpose(1, 2)
    page = backend.page_size
    return (
        k.view(-1, page, layer.tp_k_head_num, layer.head_dim),
        v.view(-1, page, layer.tp_v_head_num, layer.v_head_dim),
    )


def _longest(batch: Any, q_len: int) -> int | None:
    """The longest request's total length where the host knows it, without waiting for the device."""
    lens = batch.seq_lens_cpu
    if batch.seq_lens_sum is None or lens is None or lens.numel() == 0:
        return None
    # a target verify's lengths are without the new tokens
    return int(lens.max()) + (q_len if batch.forward_mode.is_target_verify() else 0)


def register(settings: Settings | None = None) -> Plugin | None:
    """The entry point: SGLang calls it in every process before the engine starts. Never raises.

    Returns:
        The plugin whose hooks were registered; None where there is nothing to do.
    """
    return entered("sglang", settings, _register)


def _register(settings: Settings) -> Plugin | None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plugin = Plugin(lambda: started("sglang", settings, unfamiliar))
    HookRegistry.register(f"{TARGET}.forward_extend", plugin.forward_extend, HookType.AROUND)
    for name in METADATA:
        HookRegistry.register(f"{TARGET}.{name}", plugin.metadata, HookType.AROUND)
    say(f"sglang: hooks registered for {settings.table}, {settings.mode.value}", logging.DEBUG)
    return plugin


def unfamiliar() -> str | None:
    """Why this SGLang's backend is not the one that the hooks were written against; None if it is."""
    import importlib

    from autotune.engines.outline import of_class

    try:
        found = of_class(getattr(importlib.import_module(MODULE), CLASS), RELIED_ON)
    except (ValueError, OSError, ImportError, AttributeError) as error:
        return f"{TARGET} cannot be read ({told(error)})"
    if found in KNOWN.values():
        return None
    return f"{CLASS} reads otherwise ({found}) than in SGLang {', '.join(KNOWN)}, which was read"
