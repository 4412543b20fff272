"""Kernels that are wrong on purpose, one fault each: the controls that show a check can fail.

All of them are :class:`CleanSession`, a plain torch attention, with one step replaced. None is a strawman:
each is a way in which a shipped kernel or its metadata went wrong. ``planted-clean`` has no fault and must
never be accused. Faults that touch memory they do not own do so for real, through a view made from a raw
address (torch's own views are bounds-checked): in guarded memory they end the process.

For the CPU. They take no part in ``autotune run``'s search and are not offered by entry point.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from autotune.routes.base import Capture, Family, Need

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Allocate, Capacity, Step

HANG_SECONDS = 30
_REACH = 2**31


def _bytes_at(tensor: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """``count`` bytes from ``offset`` bytes after ``tensor``'s first, whoever owns them."""
    buffer = (ctypes.c_ubyte * count).from_address(tensor.data_ptr() + offset)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _end(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a view to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class CleanSession:
    """Correct attention, request by request in fp32; every step that a fault replaces is a method."""

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        self.capacity = capacity
        self.column: Column = capacity.column
        self.shape = capacity.column.shape
        self.q_len = capacity.column.q_len
        self.allocate = allocate

    def prepare(self, step: Step) -> None:
        """Read the lengths; a fault may build other metadata."""
        self.step = step
        self.lens: list[int] = step.seq_lens.tolist()

    def run(self, out: torch.Tensor) -> None:
        """Attention of all requests."""
        for row in range(len(self.lens)):
            self.store(out, row, self.attend(row))

    def close(self) -> None:
        """Nothing is held."""

    def store(self, out: torch.Tensor, row: int, result: torch.Tensor) -> None:
        """Write one request's rows."""
        out[row * self.q_len : (row + 1) * self.q_len] = result.to(out.dtype)

    def kv_len(self, row: int) -> int:
        """Tokens of a request."""
        return self.lens[row]

    def page_ids(self, row: int, count: int) -> torch.Tensor:
        """Its first ``count`` pages, int64."""
        return self.step.page_table[row, :count].long()

    def keys(self, row: int, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
        """[kv_len, num_kv_heads, head_dim], fp32."""
        return self.step.k[pages].flatten(0, 1)[:kv_len].float()

    def values(self, row: int, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
        """[kv_len, num_kv_heads, head_dim_vo], fp32."""
        return self.step.v[pages].flatten(0, 1)[:kv_len].float()

    def queries(self, row: int) -> torch.Tensor:
        """[q_len, num_qo_heads, head_dim], fp32."""
        return self.step.q[row * self.q_len : (row + 1) * self.q_len].float()

    def scale(self) -> float:
        """Softmax scale."""
        return self.step.sm_scale * self.step.k_scale

    def value_scale(self) -> float:
        """Scale of the result."""
        return self.step.v_scale

    def visible(self, kv_len: int, i: int) -> int:
        """Tokens before the one at which query ``i`` stops seeing."""
        return max(1, kv_len - self.q_len + i + 1)

    def window(self) -> int:
        """Tokens that a query sees where there is a window, its own included."""
        return self.shape.window_left + 1

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after the soft cap."""
        cap = self.shape.soft_cap
        return torch.tanh(logits / cap) * cap if cap > 0.0 else logits

    def attend(self, row: int) -> torch.Tensor:
        """[q_len, num_qo_heads, head_dim_vo], fp32."""
        shape, kv_len = self.shape, self.kv_len(row)
        pages = self.page_ids(row, -(-kv_len // shape.page_size))
        k, v = self.keys(row, pages, kv_len), self.values(row, pages, kv_len)
        q = self.queries(row).reshape(self.q_len, shape.num_kv_heads, shape.group, shape.head_dim)
        logits = torch.einsum("ihgd,nhd->ihgn", q, k) * self.scale()
        logits = self.capped(logits)
        for i in range(self.q_len):
            end = self.visible(kv_len, i)
            first = max(0, end - self.window()) if shape.window_left >= 0 else 0
            logits[i, :, :, :first] = -torch.inf
            logits[i, :, :, max(0, end) :] = -torch.inf
        result = torch.einsum("ihgn,nhd->ihgd", self.weights(logits), v) * self.value_scale()
        return self.finish(row, result.flatten(1, 2))

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Softmax over the last dimension; a hidden token's logit is -inf."""
        return torch.softmax(logits, dim=-1)

    def finish(self, row: int, result: torch.Tensor) -> torch.Tensor:
        """Last touch on one request's result."""
        return result


SESSIONS: dict[str, type[CleanSession]] = {}
_NOT_DETERMINISTIC = {"planted-racing-documented"}
_S = TypeVar("_S", bound=type[CleanSession])


def _plant(name: str) -> Callable[[_S], _S]:
    def register(session: _S) -> _S:
        SESSIONS[f"planted-{name}"] = session
        return session

    return register


@dataclass(frozen=True)
class Planted:
    """A route by the name of its fault; picklable, so that a job can carry it.

    Raises:
        ValueError: no fault has that name.
    """

    name: str

    family = Family.DECODE
    capture = Capture.NO
    needs: frozenset[Need] = frozenset()
    version = 1

    def __post_init__(self) -> None:
        if self.name not in SESSIONS:
            raise ValueError(
                f"no planted route is called {self.name!r}; there are {', '.join(sorted(SESSIONS))}"
            )

    @property
    def deterministic(self) -> bool:
        """All but one claim it."""
        return self.name not in _NOT_DETERMINISTIC

    def supports(self, column: Column, facts: Facts) -> str | None:
        """Everything on the CPU that torch can hold, without sinks."""
        if facts.device != "cpu":
            return "planted torch kernels run on the CPU"
        if column.shape.sinks:
            return "no attention sinks"
        return None

    def open(self, capacity: Capacity, allocate: Allocate) -> CleanSession:
        """A session with the fault."""
        return SESSIONS[self.name](capacity, allocate)


SESSIONS["planted-clean"] = CleanSession


# --- wrong numbers


@_plant("scale-dropped")
class _ScaleDropped(CleanSession):
    """The softmax scale is taken for another head_dim."""

    def scale(self) -> float:
        return super().scale() * 0.9


@_plant("localized-error")
class _LocalizedError(CleanSession):
    """One head of one row is 5 % too large: lost in any average over the output."""

    def finish(self, row: int, result: torch.Tensor) -> torch.Tensor:
        if row == len(self.lens) - 1:
            result[-1, -1] *= 1.05
        return result


@_plant("misplaced-rows")
class _MisplacedRows(CleanSession):
    """The output tile holds 4 queries: other q_len land at a stride rounded up to it, or at its remainder."""

    def store(self, out: torch.Tensor, row: int, result: torch.Tensor) -> None:
        for i in range(self.q_len):
            at = row * self.q_len + i
            if self.q_len % 4 and row:
                at = (row * self.q_len + (i + 1) % self.q_len) % out.shape[0]
            out[at] = result[i].to(out.dtype)


@_plant("full-mask")
class _FullMask(CleanSession):
    """Every new token sees all new tokens."""

    def visible(self, kv_len: int, i: int) -> int:
        return kv_len


@_plant("mask-short")
class _MaskShort(CleanSession):
    """The mask stops one token early."""

    def visible(self, kv_len: int, i: int) -> int:
        return max(1, super().visible(kv_len, i) - 1)


@_plant("finite-infinity")
class _FiniteInfinity(CleanSession):
    """-5e4 stands for minus infinity: hidden tokens win where every live logit is lower."""

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        return super().weights(torch.where(logits == -torch.inf, -5e4, logits))


@_plant("no-maximum")
class _NoMaximum(CleanSession):
    """The softmax does not take out the largest logit: exp overflows past 88."""

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        weights = torch.exp(logits)
        return weights / weights.sum(dim=-1, keepdim=True)


@_plant("window-edge")
class _WindowEdge(CleanSession):
    """The window counts the earlier tokens only: a query sees one token more than it should."""

    def window(self) -> int:
        return super().window() + 1


@_plant("soft-cap-dropped")
class _SoftCapDropped(CleanSession):
    """Compiled without the soft cap that the call asks for."""

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


@_plant("value-page")
class _ValuePage(CleanSession):
    """The V page index runs one page behind K's where a tile spans several pages."""

    def values(self, row: int, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
        return super().values(row, torch.cat([pages[:1], pages[:-1]]), kv_len)


@_plant("page-edge")
class _PageEdge(CleanSession):
    """A last page that holds a single token is forgotten."""

    def visible(self, kv_len: int, i: int) -> int:
        end = super().visible(kv_len, i)
        return end - 1 if end > 1 and kv_len % self.shape.page_size == 1 and end == kv_len else end


@_plant("stale-batch")
class _StaleBatch(CleanSession):
    """Lengths are planned for the largest batch seen and kept until a larger one comes."""

    def prepare(self, step: Step) -> None:
        planned: list[int] = getattr(self, "lens", [])
        super().prepare(step)
        if len(self.lens) <= len(planned):
            self.lens = planned

    def run(self, out: torch.Tensor) -> None:
        for row in range(self.step.batch_size):
            self.store(out, row, self.attend(row))


@_plant("pad-shift")
class _PadShift(CleanSession):
    """A row shorter than q_len is taken out of the batch, and those after it move up."""

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        self.short = sum(kv_len < self.q_len for kv_len in self.lens)

    def store(self, out: torch.Tensor, row: int, result: torch.Tensor) -> None:
        super().store(out, (row + self.short) % len(self.lens), result)


@_plant("int32-offset")
class _Int32Offset(CleanSession):
    """The byte offset of a page wraps at 32 bits; a negative one is caught by a bounds clamp."""

    def page_ids(self, row: int, count: int) -> torch.Tensor:
        shape = self.shape
        size = shape.page_size * shape.num_kv_heads * shape.head_dim * self.step.k.element_size()
        offset = super().page_ids(row, count) * size
        wrapped = (offset + _REACH) % (2 * _REACH) - _REACH
        return wrapped.div(size, rounding_mode="floor").clamp(min=0)


@_plant("consecutive-pages")
class _ConsecutivePages(CleanSession):
    """Only the first page of a request is looked up; the rest are taken to follow it."""

    def page_ids(self, row: int, count: int) -> torch.Tensor:
        first = super().page_ids(row, 1)
        return (first + torch.arange(count)).clamp(max=self.step.k.shape[0] - 1)


@_plant("query-stride")
class _QueryStride(CleanSession):
    """Query rows are taken to be dense."""

    def queries(self, row: int) -> torch.Tensor:
        q = self.step.q
        dense = q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))
        return dense[row * self.q_len : (row + 1) * self.q_len].float()


@_plant("head-stride")
class _HeadStride(CleanSession):
    """The token stride is computed from the head stride, which says nothing when there is one head."""

    def keys(self, row: int, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
        k = self.step.k
        strides = (k.stride(0), k.stride(2) * self.shape.num_kv_heads, k.stride(2), 1)
        return k.as_strided(k.shape, strides)[pages].flatten(0, 1)[:kv_len].float()


@_plant("value-scale-ignored")
class _ValueScaleIgnored(CleanSession):
    """V is taken as stored."""

    def value_scale(self) -> float:
        return 1.0


@_plant("scales-swapped")
class _ScalesSwapped(CleanSession):
    """One scale for both caches, K's."""

    def value_scale(self) -> float:
        return self.step.k_scale


@_plant("scale-kept")
class _ScaleKept(CleanSession):
    """V's scale is read once, when the first step is prepared."""

    def value_scale(self) -> float:
        self.first: float = getattr(self, "first", self.step.v_scale)
        return self.first


@_plant("counter-kept")
class _CounterKept(CleanSession):
    """The counter of finished KV splits is not reset: later launches merge one split less."""

    counter = 0

    def run(self, out: torch.Tensor) -> None:
        self.late = self.counter > 0
        super().run(out)
        self.counter += max(self.lens) > 2 * self.shape.page_size

    def finish(self, row: int, result: torch.Tensor) -> torch.Tensor:
        return result * 0.5 if self.late else result


@_plant("workspace-dirty")
class _WorkspaceDirty(CleanSession):
    """The part of the workspace that is documented as zero between launches is not: the next user's loss."""

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        super().__init__(capacity, allocate)
        semaphores = allocate("semaphores", (16,), torch.int32)
        semaphores.zero_()
        self.zero_after = (semaphores,)

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.zero_after[0][3] += 1


@_plant("workspace-trusted")
class _WorkspaceTrusted(CleanSession):
    """Partial sums are added to a workspace that nobody zeroed: right where fresh memory is zero."""

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        super().__init__(capacity, allocate)
        size = (self.q_len, self.shape.num_qo_heads, self.shape.head_dim_vo)
        self.partial = allocate("partial", size, torch.float32)

    def finish(self, row: int, result: torch.Tensor) -> torch.Tensor:
        total = self.partial + result
        self.partial.zero_()
        return total


@_plant("cached-pages")
class _CachedPages(CleanSession):
    """A copy of K and V is kept until the lengths, the page table or the pool's address change."""

    def run(self, out: torch.Tensor) -> None:
        step = self.step
        key = (step.k.data_ptr(), self.lens, step.page_table.tolist())
        if getattr(self, "key", None) != key:
            self.key, self.copies = key, (step.k.clone(), step.v.clone())
        self.step = replace(step, k=self.copies[0], v=self.copies[1])
        super().run(out)


@_plant("inference-shortcut")
class _InferenceShortcut(CleanSession):
    """The path taken under torch's inference mode was never tested."""

    def scale(self) -> float:
        return super().scale() * (0.9 if torch.is_inference_mode_enabled() else 1.0)


@_plant("work-in-prepare")
class _WorkInPrepare(CleanSession):
    """Attention is computed while the step is prepared, of what the operands held then."""

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        self.done = step.q.new_empty((*step.q.shape[:2], self.shape.head_dim_vo))
        super().run(self.done)

    def run(self, out: torch.Tensor) -> None:
        out.copy_(self.done)


# --- NaN, missing and stray writes


@_plant("nan-tail")
class _NanTail(CleanSession):
    """V is multiplied by the weights of a whole last page, those past the end zero: 0 * NaN."""

    def attend(self, row: int) -> torch.Tensor:
        kv_len, page = self.lens[row], self.shape.page_size
        last = self.page_ids(row, -(-kv_len // page))[-1]
        dead = self.step.v[last, kv_len % page or page :].float()
        return super().attend(row) + (dead * 0.0).sum()


@_plant("unwritten-tail")
class _UnwrittenTail(CleanSession):
    """The last query row is left out."""

    def store(self, out: torch.Tensor, row: int, result: torch.Tensor) -> None:
        if row < len(self.lens) - 1:
            super().store(out, row, result)
        elif self.q_len > 1:
            out[row * self.q_len : (row + 1) * self.q_len - 1] = result[:-1].to(out.dtype)


@_plant("writes-nan")
class _WritesNan(CleanSession):
    """One element is NaN, whatever the output held."""

    def finish(self, row: int, result: torch.Tensor) -> torch.Tensor:
        result[0, 0, -1] = torch.nan
        return result


@_plant("reads-output")
class _ReadsOutput(CleanSession):
    """out = 0 * out + result: right over anything finite."""

    def store(self, out: torch.Tensor, row: int, result: torch.Tensor) -> None:
        rows = out[row * self.q_len : (row + 1) * self.q_len]
        rows.mul_(0.0).add_(result.to(out.dtype))


@_plant("extra-row")
class _ExtraRow(CleanSession):
    """A row after the last one is written: whoever shares the output buffer loses it."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        _bytes_at(out, _end(out), out.stride(0) * out.element_size()).zero_()


@_plant("scribbled-input")
class _ScribbledInput(CleanSession):
    """A page of K is used as scratch and not restored."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        self.step.k[self.page_ids(0, 1), -1] = 0.0


@_plant("canary-write")
class _CanaryWrite(CleanSession):
    """8 bytes before the output are written: the engine's alignment padding, or its neighbour."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        _bytes_at(out, -8, 8).zero_()


@_plant("pad-nan")
class _PadNan(CleanSession):
    """A query that sees nothing divides by a sum of zero."""

    def visible(self, kv_len: int, i: int) -> int:
        return kv_len - self.q_len + i + 1


@_plant("pad-skipped")
class _PadSkipped(CleanSession):
    """Rows shorter than q_len return early."""

    def store(self, out: torch.Tensor, row: int, result: torch.Tensor) -> None:
        if self.lens[row] >= self.q_len:
            super().store(out, row, result)


@_plant("garbage-clamped")
class _GarbageClamped(CleanSession):
    """One page more than is live is loaded, its weights zero: 0 * NaN. A bad id is clamped into the pool."""

    def attend(self, row: int) -> torch.Tensor:
        count = -(-self.lens[row] // self.shape.page_size)
        ids = self.page_ids(row, count + 1).clamp(0, self.step.k.shape[0] - 1)
        extra = self.step.v[ids[count:]].float()
        return super().attend(row) + (extra * 0.0).sum()


@_plant("garbage-followed")
class _GarbageFollowed(CleanSession):
    """The next page is fetched ahead, whatever its id."""

    def attend(self, row: int) -> torch.Tensor:
        k, count = self.step.k, -(-self.lens[row] // self.shape.page_size)
        for page in self.page_ids(row, count + 1)[count:].tolist():
            _bytes_at(k, page * k.stride(0) * k.element_size(), 64).sum()
        return super().attend(row)


@_plant("racing")
class _Racing(CleanSession):
    """Every third launch adds in another order."""

    calls = itertools.count()

    def run(self, out: torch.Tensor) -> None:
        self.flip = next(self.calls) % 3 == 2
        super().run(out)

    def finish(self, row: int, result: torch.Tensor) -> torch.Tensor:
        return result * (1 + 2.0**-7) if self.flip else result


@_plant("racing-documented")
class _RacingDocumented(_Racing):
    """As ``racing``, but documented: within the bound it is no fault, 10 % off it is."""

    calls = itertools.count()

    def finish(self, row: int, result: torch.Tensor) -> torch.Tensor:
        return result * 1.1 if self.flip else result


# --- what ends a process


@_plant("narrow-table")
class _NarrowTable(CleanSession):
    """The page table is built from KV-only lengths, one page too narrow for ``seq_lens``.

    The kernel reads ceil(seq_len / page) entries of a row: the next request's pages, and past the end of the
    table for the last request.
    """

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        page = self.shape.page_size
        self.width = max(1, -(-(max(self.lens) - self.q_len) // page))
        self.table = self.allocate("page_table_built", (step.batch_size, self.width), torch.int32)
        self.table.copy_(step.page_table[:, : self.width])

    def page_ids(self, row: int, count: int) -> torch.Tensor:
        entries = _bytes_at(self.table, row * self.width * 4, count * 4).view(torch.int32)
        return entries.long().clamp(0, self.step.k.shape[0] - 1)


@_plant("read-past-end")
class _ReadPastEnd(CleanSession):
    """The last tile of V is read in full."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        _bytes_at(self.step.v, _end(self.step.v), 4096).sum()


@_plant("read-before-start")
class _ReadBeforeStart(CleanSession):
    """A window's first tile begins before K does."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        _bytes_at(self.step.k, -64, 64).sum()


@_plant("tail-padding")
class _TailPadding(CleanSession):
    """The query is read in whole 64-byte vectors: right with padding behind it, a fault without."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        _bytes_at(self.step.q, _end(self.step.q), 64).sum()


@_plant("write-past-end")
class _WritePastEnd(CleanSession):
    """8 KiB after the output are written."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        _bytes_at(out, _end(out), 8192).zero_()


@_plant("raises")
class _Raises(CleanSession):
    """The launch is refused by the library."""

    def run(self, out: torch.Tensor) -> None:
        raise RuntimeError("no kernel was compiled for this q_len")


@_plant("hang")
class _Hang(CleanSession):
    """Waits inside C without letting go of the interpreter; gives up by itself, in case nobody watches."""

    def run(self, out: torch.Tensor) -> None:
        ctypes.PyDLL(None).sleep(HANG_SECONDS)
        super().run(out)


@_plant("abort")
class _Abort(CleanSession):
    """A device assert, as the host sees it."""

    def run(self, out: torch.Tensor) -> None:
        ctypes.CDLL(None).abort()


@_plant("null-pointer")
class _NullPointer(CleanSession):
    """A plan that was never made is followed."""

    def run(self, out: torch.Tensor) -> None:
        ctypes.string_at(0)


@_plant("freed-memory")
class _FreedMemory(CleanSession):
    """Reads memory that is none of the arena's: a segmentation fault outside every hole."""

    def run(self, out: torch.Tensor) -> None:
        page = mmap.mmap(-1, mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(page))
        libc = ctypes.CDLL(None)
        libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 0)
        ctypes.string_at(address, 1)
