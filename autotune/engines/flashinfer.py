"""``install(table)``: anybody's calls of ``flashinfer.decode.trtllm_batch_decode_with_kv_cache``, routed.

    from autotune.engines import flashinfer

    hook = flashinfer.install("tuned_configs/nvidia-h200.sglang.yaml")
    ...
    hook.uninstall()

For an engine that calls that function itself. The function is replaced in FlashInfer and wherever it was
imported by name before; ``uninstall`` puts back what was there. A call is left alone unless the table decides
otherwise for it and the static contract of the kernel that would be called holds; an argument that no route
knows leaves the call alone too. A kernel that fails in its place is replaced by the engine's own, but not
where that one is unsafe, in quarantine or refused by the contract: there ``RefusedCallError`` is raised.
Every decision is made when Python runs: under CUDA graphs that is at capture.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.domain.cell import Column
from autotune.domain.dtypes import DTypes
from autotune.domain.shape import Shape
from autotune.engines import context_kernels
from autotune.engines.choice import Choice, Chooser
from autotune.engines.environment import Miss, Mode, state_folder
from autotune.engines.pool import dtype_name, layout_of
from autotune.engines.runtime import Runtime, capturing, collected, recorded
from autotune.router import Router
from autotune.routes.base import Capacity, Step
from autotune.routes.contract import Buffers, Context, Contract

if TYPE_CHECKING:
    import os

    import torch

    from autotune.router.facts import FactsLike
    from autotune.router.watch import Watch

MODULE, NAME = "flashinfer.decode", "trtllm_batch_decode_with_kv_cache"

# What a call may say and still be one that another kernel can answer. Anything else must have its default.
_KNOWN = frozenset(
    {
        *("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"),
        *("bmm1_scale", "bmm2_scale", "window_left", "out", "out_dtype", "sinks", "kv_layout"),
        *("enable_pdl", "backend", "q_len_per_req", "mask", "multi_ctas_kv_counter_buffer"),
    }
)
# By which a caller of ``install`` says that each mask which it hands over is causal.
CAUSAL_MASK = "causal_mask"
# An engine has a few layer kinds; a caller whose max_seq_len follows the batch would make one a step.
_MOST_KINDS = 64
_MOST_COLUMNS = 1024


class NotOursError(Exception):
    """A call that is left alone, and why."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What many calls have in common, found out once; compared by identity, since a hash of it all is dear.

    Attributes:
        shape, dtypes: per-rank shape and what the caller holds.
        called: the kernel that the library would run.
        columns: (q_len, batch size, max_seq_len) -> the column of such a call.
    """

    shape: Shape
    dtypes: DTypes
    called: str
    columns: dict[tuple[int, int, int], Column] = field(default_factory=dict)

    def column(self, step: Step, pad_value: int) -> Column:
        """Of one call."""
        key = (step.q_len, step.batch_size, step.max_seq_len)
        found = self.columns.get(key)
        if found is None:
            if len(self.columns) >= _MOST_COLUMNS:
                self.columns.clear()
            found = self.columns[key] = Column(
                self.shape, self.dtypes, *key, pad_value=min(pad_value, step.max_seq_len)
            )
        return found


@dataclass(frozen=True, slots=True)
class Request:
    """A decode call in the table's words.

    Attributes:
        step: K and V as logical NHD views of the caller's pool.
        out: the caller's output, or None.
        out_dtype: torch dtype of an output that is made here.
        buffers: the caller's workspace and mask, for the decode kernel's own rules.
    """

    step: Step
    kind: Kind
    out: torch.Tensor | None
    out_dtype: Any
    buffers: Buffers

    def __str__(self) -> str:
        return self.cell

    @property
    def cell(self) -> str:
        """For a person: ``8/1/128 bf16/bf16 q_len 4 batch 16``."""
        shape, dtypes = self.kind.shape, self.kind.dtypes
        return (
            f"{shape.num_qo_heads}/{shape.num_kv_heads}/{shape.head_dim} {dtypes.q}/{dtypes.kv} "
            f"q_len {self.step.q_len} batch {self.step.batch_size}"
        )


def read_call(
    call: Mapping[str, Any], defaults: Mapping[str, Any], major: int, kinds: dict[tuple[Any, ...], Kind]
) -> Request:
    """What a call asks for.

    Args:
        call: its arguments by name.
        defaults: the library's defaults.
        major: of the compute capability, by which the library picks a kernel for ``backend="auto"``.
        kinds: those seen before; a new one is added.

    Raises:
        NotOursError: an argument says something that no route knows.
    """
    for name, value in call.items():
        if name not in _KNOWN and not _is_default(value, defaults.get(name)):
            raise NotOursError(f"argument {name} is given")
    cache = call["kv_cache"]
    k, v = cache if isinstance(cache, (tuple, list)) else cache.unbind(1)
    if call.get("kv_layout", defaults.get("kv_layout", "HND")) == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    query, table = call["query"], call["block_tables"]
    q_len = call.get("q_len_per_req", 1)
    if type(q_len) is not int:
        raise NotOursError("q_len_per_req is not given")
    bmm1, bmm2 = call.get("bmm1_scale", 1.0), call.get("bmm2_scale", 1.0)
    if not (isinstance(bmm1, (int, float)) and isinstance(bmm2, (int, float))):
        raise NotOursError("a scale is a tensor")
    out, sinks = call.get("out"), call.get("sinks")
    if isinstance(sinks, (tuple, list)):
        if len(sinks) > 1:
            raise NotOursError("several sinks are given")
        sinks = sinks[0] if sinks else None
    out_dtype = call.get("out_dtype") or (query.dtype if out is None else out.dtype)
    backend, window = call.get("backend", defaults.get("backend", "auto")), call.get("window_left", -1)
    # everything that the kind depends on, the way from K to V and their storages included
    key = (
        *(query.shape[1:], query.dtype, k.shape, k.stride(), k.dtype, out_dtype),
        *(v.shape, v.stride(), v.dtype),
        *(v.data_ptr() - k.data_ptr(), k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()),
        *(window, sinks is None, backend),
    )
    kind = kinds.get(key)
    if kind is None:
        if len(kinds) >= _MOST_COLUMNS:
            kinds.clear()
        kind = kinds[key] = _kind(query, k, v, out_dtype, int(window), sinks is not None, backend, major)
    step = Step(
        q=query,
        k=k,
        v=v,
        page_table=table,
        seq_lens=call["seq_lens"],
        host_kv_lens=None,
        q_len=q_len,
        sm_scale=float(bmm1),
        k_scale=1.0,
        v_scale=float(bmm2),
        max_seq_len=int(call["max_seq_len"]),
        sinks=sinks,
    )
    buffers = Buffers(workspace=call["workspace_buffer"], mask=call.get("mask"))
    return Request(step, kind, out, out_dtype, buffers)


def _kind(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out_dtype: Any,
    window: int,
    sinks: bool,
    backend: str,
    major: int,
) -> Kind:
    names = [dtype_name(dtype) for dtype in (query.dtype, k.dtype, out_dtype)]
    if None in names or v.dtype != k.dtype or k.dim() != 4 or query.dim() != 3:
        raise NotOursError(f"operands are {query.dtype}, {k.dtype}, {v.dtype}, {out_dtype}")
    called = {
        "xqa": "xqa-decode",
        "trtllm-gen": "trtllm-gen-decode",
        "auto": "trtllm-gen-decode" if major == 10 else "xqa-decode",
    }.get(backend)
    if called is None:
        raise NotOursError(f"backend is {backend!r}")
    layout = layout_of(k, v)
    if layout is None:
        raise NotOursError(
            f"K and V lie in no pool that a table has (strides {tuple(k.stride())} and {tuple(v.stride())})"
        )
    shape = Shape(
        int(query.shape[1]),
        int(k.shape[2]),
        int(query.shape[2]),
        int(k.shape[1]),
        head_dim_vo=int(v.shape[3]),
        kv_layout=layout,
        window_left=window,
        sinks=sinks,
    )
    return Kind(shape, DTypes(*(name or "" for name in names)), called)


def _is_default(value: object, default: object) -> bool:
    if value is None:
        return True
    try:
        return type(value) is type(default) and bool(value == default)
    except Exception:  # a tensor compares to a tensor
        return False


def _misshapen(request: Request) -> str | None:
    """What is wrong with the form of a call's mask; its contents are on the device and not looked at."""
    mask: Any = request.buffers.mask
    step = request.step
    form = (step.batch_size, step.q_len, 2 * -(-step.q_len // 32))
    wanted = f"a contiguous uint16 tensor {form} on {step.q.device} is needed"
    try:
        right = tuple(mask.shape) == form and str(mask.dtype) == "torch.uint16" and mask.is_contiguous()
        if right and mask.device == step.q.device:
            return None
        return f"the mask is {tuple(mask.shape)} {mask.dtype} on {mask.device}; {wanted}"
    except AttributeError:
        return f"the mask is a {type(mask).__name__}; {wanted}"


# (kind, max_seq_len) -> the chooser, and (batch, q_len) -> what it answered
_Choosers = dict[tuple[Kind, int], tuple[Chooser, dict[tuple[int, int], Choice]]]


class Hook:
    """An installed replacement. ``counts``: what was called and why; ``explain``: what a call would get."""

    def __init__(
        self,
        runtime: Runtime,
        original: Callable[..., Any],
        *,
        major: int,
        sizes: tuple[int, ...] = (),
        pad_value: int | None = None,
    ) -> None:
        self.runtime = runtime
        self._original = original
        self._major = major
        self._sizes, self._pad_value = sizes, pad_value
        signature = inspect.signature(original)
        self._signature = signature
        self._defaults = {
            name: parameter.default
            for name, parameter in signature.parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        # with the generation that they are of: a thread that was slow keeps its own, of the table before
        self._choosers: tuple[int, _Choosers] = (-1, {})
        self._contracts: dict[tuple[Any, ...], tuple[Column, Contract]] = {}
        self._called: set[tuple[str, Kind, int, int]] = set()
        self.scratch = context_kernels.Scratch()
        self._bindings: list[tuple[types.ModuleType, str]] = []
        self._watch: Watch | None = None

    @property
    def counts(self) -> Mapping[tuple[str, str], int]:
        """(kernel that was called, or would have been under ``observe``; why) -> calls."""
        return dict(self.runtime.counts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The library's function: the same arguments, the same result.

        Raises:
            RefusedCallError: the engine's own kernel is refused for this call and its replacement failed.
            Exception: whatever the library raises.
        """
        try:
            picked = self._pick(args, kwargs)
        except NotOursError as reason:
            self.runtime.counts["stock", str(reason)] += 1
            picked = None
        except Exception as error:
            self.runtime.failed(error, "reading a call")
            picked = None
        if picked is None:
            return self._stock(args, kwargs)
        request, choice, column, chooser = picked
        route = choice.route
        if route is None:
            out = self._stock(args, kwargs)
            self._ran(chooser, request, request.kind.called)
            return out
        try:
            out = request.out
            if out is None:
                rows = (
                    request.step.q.shape[0],
                    request.kind.shape.num_qo_heads,
                    request.kind.shape.head_dim_vo,
                )
                out = request.step.q.new_empty(rows, dtype=request.out_dtype)
            step = request.step
            if choice.why == "contract":
                step.seq_lens = step.seq_lens.clamp(max=step.max_seq_len)
            out = context_kernels.run(route, step, column, self.scratch, out)
            self._ran(chooser, request, route)
            return out
        except Exception as error:
            if self.runtime.saw(error):
                raise
            if choice.refuses_stock:
                raise choice.refusal(request.kind.called, request.cell, error) from error
            self.runtime.failed(error, f"calling {route} at {request.cell}")
            out = self._stock(args, kwargs)
            self._ran(chooser, request, request.kind.called)
            return out

    def _ran(self, chooser: Chooser | None, request: Request, kernel: str) -> None:
        if chooser is not None:  # under capture
            self.runtime.recorded(chooser, request.step.batch_size, request.step.q_len, kernel)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """What this call would get, and why, in one line. Launches nothing, counts nothing."""
        try:
            request = self._read(args, kwargs)
            choice = self._judge(request)[0]
        except NotOursError as reason:
            return f"left alone: {reason}"
        except Exception as error:
            return f"left alone: {type(error).__name__}: {error}"
        return f"{choice.route or request.kind.called} at {request.cell}, {choice.why}: {choice.detail}"

    def uninstall(self) -> None:
        """Put the library's function back wherever this hook stands. Captured graphs stay as they are.

        So does the crash record, until this process ends in order: those graphs may be replayed. The table
        is no longer watched if :func:`install` loaded it.
        """
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        for module, name in self._bindings:
            if getattr(module, name, None) is self._installed:
                setattr(module, name, self._original)
        self._bindings.clear()

    def _install(self) -> None:
        @functools.wraps(self._original)
        def trtllm_batch_decode_with_kv_cache(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        self._installed = trtllm_batch_decode_with_kv_cache
        modules: list[object] = list(sys.modules.values())  # what is registered there may be no module
        for module in modules:
            if not isinstance(module, types.ModuleType):
                continue
            for name, value in list(vars(module).items()):
                if value is self._original:
                    setattr(module, name, self._installed)
                    self._bindings.append((module, name))

    def _stock(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return self._original(*args, **kwargs)
        except Exception as error:
            self.runtime.saw(error)
            raise

    def _read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Request:
        call = kwargs if not args else self._signature.bind(*args, **kwargs).arguments
        return read_call(call, self._defaults, self._major, self._kinds)

    def _pick(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Request, Choice, Column, Chooser | None] | None:
        runtime = self.runtime
        if not runtime.active:
            return None
        request = self._read(args, kwargs)
        if runtime.traffic is not None:
            runtime.traffic.count(request.step.batch_size, request.step.q_len, None)
        # before the call is judged, which may narrow its max_seq_len
        chooser = self._chooser(request)[0] if capturing() else None
        choice, column = self._judge(request)
        runtime.note(choice, request.kind.called, request)
        if runtime.mode is not Mode.ROUTE:
            return None
        if choice.route is not None or choice.decided:
            route = choice.route or request.kind.called
            mark = (route, request.kind, request.step.batch_size, request.step.q_len)
            if mark not in self._called:
                self._called.add(mark)
                runtime.calling(route, request.cell)
        return request, choice, column, chooser

    def _judge(self, request: Request) -> tuple[Choice, Column]:
        """The table's answer, if the contract of the kernel behind it holds; else what a miss gets.

        A context kernel takes no mask: it attends causally. So a call with one keeps the engine's kernel
        unless the caller attests that its masks are causal, since their contents are not read here.
        """
        choice, column = self._unmasked(request)
        if choice.route is None or request.buffers.mask is None:
            return choice, column
        if CAUSAL_MASK not in self.runtime.attests:
            why = f'{choice.route} ignores the mask given; attests={{"{CAUSAL_MASK}"}} says that it is causal'
            if choice.why == "contract":  # the rule that is broken is what has to be told and counted
                return Choice(None, "contract", f"{choice.detail}; {why}", decided=False), column
            return Choice(None, "mask", why, decided=False), column
        if (wrong := _misshapen(request)) is not None:
            return Choice(None, "contract", wrong, decided=False), column
        return choice, column

    def _unmasked(self, request: Request) -> tuple[Choice, Column]:
        """:meth:`_judge` without the mask of a context kernel's call."""
        step, kind = request.step, request.kind
        pad = 1 if self._pad_value is None else self._pad_value
        column = kind.column(step, pad)
        chooser, known = self._chooser(request)
        choice = known.get((step.batch_size, step.q_len))
        if choice is None:
            choice = known[step.batch_size, step.q_len] = chooser.choose(step.batch_size, step.q_len)
        own = None if choice.route is not None else request.buffers
        broken = self._broken(choice.route or request.kind.called, column, step, request.out, own)
        if broken is None:
            return choice, column
        # the seed's fault is found here; where the table names the context kernel, the engine's own is no way
        # out: the decode kernel would be called with these operands
        choice = chooser.refused(step.batch_size, step.q_len, broken)
        if choice.route is None:
            return choice, column
        # A context kernel reads no further than its lengths, which are cut (on the device, where they are)
        # at what the table covers: a request loses what nobody can find rather than the process its context.
        covered = step.page_table.shape[1] * kind.shape.page_size if step.page_table.dim() == 2 else 0
        covered = min(covered, column.max_context)  # a table's last page, or a spare one, may reach further
        if covered < step.q_len:
            return Choice(None, "contract", broken, decided=False), column
        step.max_seq_len = covered
        column = kind.column(step, pad)
        again = self._broken(choice.route, column, step, request.out)
        if again is not None:
            return Choice(
                None, "contract", f"{broken}; and for {choice.route}: {again}", decided=False
            ), column
        return choice, column

    def _chooser(self, request: Request) -> tuple[Chooser, dict[tuple[int, int], Choice]]:
        """The kind's chooser, and what it answered already: until the table is reloaded that stays."""
        generation, choosers = self._choosers
        if self.runtime.router.generation != generation:  # another table, or none for now
            choosers = {}
            self._choosers = (self.runtime.router.generation, choosers)
        kind = request.kind
        key = (kind, request.step.max_seq_len)
        found = choosers.get(key)
        if found is None:
            if len(choosers) >= _MOST_KINDS:
                raise NotOursError("max_seq_len differs from call to call; pass the engine's max context")
            made = self.runtime.chooser(
                kind.shape,
                kind.dtypes,
                max_context=request.step.max_seq_len,
                stock=request.kind.called,
                fallback="trtllm-gen-context" if self._major == 10 else "fmha-v2",
                deployable=context_kernels.DEPLOYABLE,
                pad_value=self._pad_value,
                sizes=self._sizes,
            )
            found = choosers[key] = (made, {})
        return found

    def _broken(
        self, route: str, column: Column, step: Step, out: torch.Tensor | None, own: Buffers | None = None
    ) -> str | None:
        """The first rule that a call of ``route`` breaks; ``own``: what else the caller hands to it."""
        pages = int(step.k.shape[0])
        # columns are one object per kind and call: compared by identity, kept alive by the contract
        key = (route, id(column), pages, _place(own))
        found = self._contracts.get(key)
        if found is None or found[0] is not column:
            if len(self._contracts) >= _MOST_KINDS * 8:
                self._contracts.clear()
            # the launch grid and the proven sizes bound the batch; the capacity need not
            capacity = Capacity(column, 1 << 30, pages, step.q.device.type)
            made = Contract(capacity, route=route, pad_value=column.pad_value, context=Context(buffers=own))
            found = self._contracts[key] = (column, made)
        error = found[1].broken(step, out)
        return None if error is None else str(error)


def _place(own: Buffers | None) -> tuple[Any, ...]:
    """What the rules look at in a caller's buffers: a contract is made once for each."""
    parts = () if own is None else (own.workspace, own.mask)
    return tuple(
        None if part is None else (part.data_ptr(), part.shape, part.dtype, part.device) for part in parts
    )


def install(
    table: str | os.PathLike[str] | Router | Runtime,
    *,
    facts: FactsLike = None,
    mode: Mode | str = Mode.ROUTE,
    miss: Miss | str = Miss.STOCK,
    attests: Iterable[str] = (),
    capture_sizes: Iterable[int] = (),
    pad_value: int | None = None,
    state: str | os.PathLike[str] | None = None,
) -> Hook:
    """Replace FlashInfer's decode function by one that asks the table.

    Args:
        table: a table's path, which is watched for changes from then on and gets a crash record, as in a
            plugin; or a router or runtime that is made already, whose watching and record are its owner's.
        facts: of this machine; collected here if None.
        mode: ``route``, or ``observe`` to count and log only.
        miss: what a call gets that the table does not decide or that breaks the contract.
        attests: requirements that the caller guarantees, such as ``finite_pool``. ``causal_mask``: every
            ``mask`` that is handed over is causal; without it a call with a mask keeps its kernel. A runtime
            has its own.
        capture_sizes: the batch sizes that will be captured, for the line at start; the table's if empty.
        pad_value: KV length of padded rows; None: as the table's engine pads.
        state: folder of the crash record; ``AUTOTUNE_STATE``'s, or the user's cache, if None.

    Raises:
        ImportError: FlashInfer is not installed.
        ValueError: an unknown mode or miss policy, or an installed hook already.
        HardwareError: the facts of this machine cannot be had. A table that does not fit raises nothing: its
            hook is inactive, and ``hook.runtime.router.status`` says why.
    """
    import importlib

    library: Any = importlib.import_module(MODULE)
    original = getattr(library, NAME)
    if getattr(original, "__autotune__", None) is not None:
        raise ValueError("flashinfer is hooked already; uninstall() the other hook first")
    watched = None
    if isinstance(table, Runtime):
        runtime = table
    else:
        mode, miss, captured = Mode(mode), Miss(miss), None
        if not isinstance(table, Router):
            table = watched = Router.load(table, facts=collected() if facts is None else facts)
            captured = recorded(state_folder() if state is None else Path(state), "flashinfer", watched)
        attested = {attests} if isinstance(attests, str) else attests
        runtime = Runtime(
            table, engine="flashinfer", mode=mode, miss=miss, attests=attested, captured=captured
        )
    found = runtime.router.table
    capability = str(found.facts.hardware.get("compute_capability", "")) if found is not None else ""
    major = int(capability.split(".", 1)[0]) if capability[:1].isdigit() else 0
    hook = Hook(runtime, original, major=major, sizes=tuple(capture_sizes), pad_value=pad_value)
    hook._install()
    if watched is not None:
        hook._watch = watched.watch()
    hook._installed.__autotune__ = hook  # type: ignore[attr-defined]
    return hook


def uninstall() -> bool:
    """Remove the hook that stands in FlashInfer, if there is one; whether there was."""
    library: Any = sys.modules.get(MODULE)
    hook = getattr(getattr(library, NAME, None), "__autotune__", None)
    if not isinstance(hook, Hook):
        return False
    hook.uninstall()
    return True
