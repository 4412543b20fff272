"""The vLLM plugin (entry point ``vllm.general_plugins``): the FlashInfer backend's decode/prefill decision.

``FlashInferMetadataBuilder.build`` splits a batch into decodes and prefills by ``reorder_batch_threshold``,
and each part then goes to its own kernel family. The hook stands around that method. To take the context
route for a uniform speculative batch it presents the threshold as 0 for the time of the call, so that vLLM's
own prefill path (its planning, query dtype, buffers) serves every request; to take the decode route it leaves
the call alone. Plain decode and mixed batches are never touched.

vLLM makes the metadata of its prefill path anew in each build, at new addresses, and plans on the host: they
cannot be captured. Where full graphs are captured for decodes, nothing is routed, and the log names the
setting that would allow it.

vLLM 0.33 packs K and V of a token's head in one row of its cache (``KvLayout.PACKED_NHD``, ``PACKED_HND``).
Where pages of several layers lie between those of one, or are padded to another layer's size, no table has
the layout: the plugin says so and routes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from autotune.domain.cell import Column
from autotune.domain.dtypes import DTypes
from autotune.domain.shape import KvLayout, Shape
from autotune.engines.choice import Choice, Chooser
from autotune.engines.environment import Mode, Settings
from autotune.engines.log import Once, told
from autotune.engines.pool import dtype_name
from autotune.engines.runtime import Runtime, entered, started

if TYPE_CHECKING:
    import types

MODULE = "vllm.v1.attention.backends.flashinfer"
CLASS = "FlashInferMetadataBuilder"
RELIED_ON = (
    "build",
    "kv_cache_layout",
    "_compute_decode_query_lens",
    "_get_decode_mask",
    "_get_prefill_wrapper",
    "get_q_data_type",
)
# vLLM's version -> fingerprint of those methods.
KNOWN = {"0.33.0": "c3be0df5c1e2907c"}
# Row padding of a replayed graph; eager batches, the only ones routed here, have none.
PAD_VALUE = 0

FULL_GRAPH = (
    "decodes are captured in full CUDA graphs, where vLLM's prefill path cannot run; start vLLM with "
    '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\' to have them routed'
)

# Of KVCacheLayout, those whose pages of one layer follow each other; in the others layers lie between them.
LAYOUTS = {"LBNHC": KvLayout.PACKED_NHD, "LBHNC": KvLayout.PACKED_HND}
OTHER_LAYOUT = (
    "its KV cache is laid out as {found}; tables have LBNHC and LBHNC with dense pages, and a proof of one "
    "layout says nothing of another"
)
# A fallback that no hook can call: such a call stays vLLM's own.
NO_KERNEL = "none of these"
# FlashInfer's is_fa3_prefill_head_dim_supported, for equal head dims.
FA3_HEAD_DIMS = (64, 128, 256)


class Plugin:
    """The hook, and what it knows. The runtime starts at the first speculative batch of this process."""

    def __init__(self, begin: Callable[[], Runtime | None]) -> None:
        self._begin, self._begun = begin, False
        self.runtime: Runtime | None = None
        self._once = Once()
        self._choosers: dict[tuple[Shape, DTypes, int], Chooser] = {}
        self._disabled = False
        self._generation = -1

    def build(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around ``build(self, common_prefix_len, common_attn_metadata, fast_build)``."""
        taken = None
        try:
            taken = self._take_context(args, kwargs)
        except Exception as error:
            self._failed(error, "choosing a route")
        if taken is None:
            return original(*args, **kwargs)
        builder = args[0]
        threshold = builder.reorder_batch_threshold
        try:
            builder.reorder_batch_threshold = 0
            return original(*args, **kwargs)
        except Exception as error:
            if self.runtime is not None and self.runtime.saw(error):
                raise
            choice, stock, column = taken
            if choice.refuses_stock:
                raise choice.refusal(stock, column, error) from error
            self._disabled = True
            self._failed(error, "vLLM's prefill path")
        finally:
            builder.reorder_batch_threshold = threshold
        return original(*args, **kwargs)

    def _failed(self, error: BaseException, where: str) -> None:
        self._once(where, f"vllm: {where}: {told(error)}; vLLM's own path is taken")

    def _take_context(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Choice, str, Column] | None:
        """The choice of vLLM's prefill path, the kernel that it replaces, and where; None: vLLM's own way."""
        builder = args[0]
        common = args[2] if len(args) > 2 else kwargs["common_attn_metadata"]
        size, q_len = int(common.num_reqs), int(common.max_query_len)
        if not (
            1 < q_len <= builder.reorder_batch_threshold
            and size > 0
            and int(common.num_actual_tokens) == size * q_len
            and common.causal
        ):
            return None
        if not self._begun:
            self._begun = True
            self.runtime = self._begin()
        runtime = self.runtime
        if runtime is None or not runtime.active or builder.use_dcp or builder.is_kvcache_nvfp4:
            return None
        longest = int(common.max_seq_len)
        if runtime.traffic is not None:
            runtime.traffic.count(size, q_len, longest)
        found = self._choose(builder, size, q_len, longest)
        if found is None:
            return None
        choice, stock, column = found
        if choice.moved and builder.enable_cuda_graph:
            choice = Choice(None, "not_deployable_here", FULL_GRAPH, decided=False)
        if choice.moved and (why := broken(column, common)):
            choice = Choice(None, "contract", why, decided=False)
        if self._disabled:
            choice = choice.left()
        runtime.note(choice, stock, str(column))
        if not choice.moved or runtime.mode is not Mode.ROUTE:
            return None
        runtime.calling(choice.route or stock, str(column))
        return choice, stock, column

    def _choose(self, builder: Any, size: int, q_len: int, longest: int) -> tuple[Choice, str, Column] | None:
        runtime = self.runtime
        q = dtype_name(builder.model_config.dtype)
        kv = dtype_name(builder.kv_cache_dtype)
        if runtime is None or q is None or kv is None:
            return None
        layout, found = layout_of(builder)
        if layout is None:
            self._once(f"layout {found}", f"vllm: nothing is routed: {OTHER_LAYOUT.format(found=found)}")
            return None
        if runtime.router.generation != self._generation:  # a chooser keeps the fallback of its table
            self._generation = runtime.router.generation
            self._choosers.clear()
        stock = decode_kernel(builder)
        shape = Shape(
            builder.num_qo_heads,
            builder.num_kv_heads,
            builder.head_dim,
            builder.page_size,
            kv_layout=layout.value,
            window_left=int(builder.window_left),
            sinks=bool(builder.has_sinks),
            soft_cap=float(builder.logits_soft_cap or 0.0),
        )
        dtypes, longest_ever = DTypes(q, kv, q), int(builder.model_config.max_model_len)
        chooser = self._choosers.get((shape, dtypes, longest_ever))
        if chooser is None:
            table = runtime.router.table
            capability = table.facts.hardware.get("compute_capability") if table is not None else None
            context = context_kernel(builder, kv, str(capability))
            chooser = self._choosers[shape, dtypes, longest_ever] = runtime.chooser(
                shape,
                dtypes,
                max_context=longest_ever,
                stock=stock,
                fallback=context or NO_KERNEL,
                deployable=frozenset({context} if context else ()),
                q_lens=(q_len,),
            )
        column = Column(shape, dtypes, q_len, size, longest_ever, pad_value=PAD_VALUE)
        return chooser.choose(size, q_len, longest), stock, column


def layout_of(builder: Any) -> tuple[KvLayout | None, str]:
    """The layout of the builder's KV cache, None where no table has it; and what it is called."""
    name = str(getattr(builder.kv_cache_layout, "name", builder.kv_cache_layout))
    rows = int(builder.page_size) * int(builder.num_kv_heads)
    dense = rows * 2 * int(builder.head_dim) * int(builder.kv_cache_dtype.itemsize)
    if (page := int(builder.kv_cache_spec.page_size_bytes)) != dense:
        return None, f"{name} with {page} bytes a page, of which K and V take {dense}"
    return LAYOUTS.get(name), name


def decode_kernel(builder: Any) -> str:
    """What vLLM calls for a uniform speculative batch; adaptive verification makes the call a ragged one."""
    name = str(getattr(builder.flashinfer_trtllm_api_decode_kernel, "name", "")).lower()
    if name == "trtllm_gen":
        return "trtllm-gen-decode-ragged" if builder.use_trtllm_gen_varlen_decode else "trtllm-gen-decode"
    return "xqa-decode" if name == "xqa" else "fa2-decode"


def context_kernel(builder: Any, kv: str, capability: str) -> str | None:
    """What vLLM's own prefill path runs for a layer kind on this device; None where that is no route.

    ``_get_prefill_wrapper`` leaves the choice to FlashInfer (``determine_attention_backend``): ``fa3`` on
    9.0, with an 8-bit cache for a query of its dtype only, else ``fa2``. On 10.x ``use_trtllm_attention``
    takes the trtllm-gen kernel, but for a 16-bit query over an 8-bit cache: there it depends on a flag.
    """
    alike = (dtype_name(builder.q_data_type_prefill) == "e4m3") == (kv == "e4m3")
    if capability.startswith("10."):
        return "trtllm-gen-context" if alike else None
    if builder.has_sinks:
        return None  # a wrapper of its own
    if capability == "9.0" and alike and builder.head_dim in FA3_HEAD_DIMS:
        return "fa3"
    return "fa2" if dtype_name(builder.q_data_type_prefill) != "e4m3" else None


def broken(column: Column, common: Any) -> str | None:
    """The rules that can be asked before vLLM has made a call of it: the operands are not there yet."""
    lens, table = common.seq_lens, common.block_table_tensor
    if tuple(lens.shape) != (column.batch_size,) or str(lens.dtype) != "torch.int32":
        return f"seq_lens is {tuple(lens.shape)} {lens.dtype}; {column.batch_size} int32 lengths are needed"
    if table.dim() != 2 or table.shape[0] != column.batch_size or str(table.dtype) != "torch.int32":
        return f"the block table is {tuple(table.shape)} {table.dtype}; {column.batch_size} rows are needed"
    covered = int(table.shape[1]) * column.shape.page_size
    if covered < int(common.max_seq_len):
        return f"the block table covers {covered} tokens; the longest request has {common.max_seq_len}"
    if int(common.max_seq_len) < column.q_len:
        return f"the longest request has {common.max_seq_len} tokens, fewer than q_len {column.q_len}"
    return None


def register(settings: Settings | None = None) -> Plugin | None:
    """The entry point: vLLM calls it in every process, and may do so again. Never raises.

    Returns:
        The plugin whose hook was put in place; None where there is nothing to do.
    """
    return entered("vllm", settings, _register)


def _register(settings: Settings) -> Plugin | None:
    import importlib

    module = importlib.import_module(MODULE)
    cls = getattr(module, CLASS)
    if getattr(cls.build, "__autotune__", None) is not None:
        return None
    why = unfamiliar(module)

    # read now: afterwards the class has our hook in it
    plugin = Plugin(lambda: started("vllm", settings, lambda: why))
    hook(cls, plugin)
    return plugin


def hook(cls: type, plugin: Plugin) -> None:
    """Put ``plugin`` around ``cls.build``; vLLM has no registry for it."""
    original = vars(cls)["build"]

    @wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        return plugin.build(original, *args, **kwargs)

    build.__autotune__ = plugin  # type: ignore[attr-defined]
    cls.build = build  # type: ignore[attr-defined]


def unfamiliar(module: types.ModuleType) -> str | None:
    """Why this vLLM's builder is not the one that the hook was written against; None if it is."""
    from autotune.engines.outline import of_class

    try:
        found = of_class(getattr(module, CLASS), RELIED_ON)
    except (ValueError, OSError, AttributeError) as error:
        return f"{MODULE}.{CLASS} cannot be read ({told(error)})"
    if found in KNOWN.values():
        return None
    return f"{CLASS} reads otherwise ({found}) than in vLLM {', '.join(KNOWN)}, which was read"
