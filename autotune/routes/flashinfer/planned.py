"""What the two FlashInfer wrappers share: ragged page lists, graph-mode buffers, one wrapper a batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.routes.contract import ContractError
from autotune.routes.flashinfer.call import Call, resolve
from autotune.routes.flashinfer.metadata import WORKSPACE_BYTES, Query, check_rows, uniform_offsets

if TYPE_CHECKING:
    import torch

    from autotune.routes.base import Allocate, Capacity, Step

# What the wrappers allocate for themselves; handed over instead, so that it is guarded too.
INT_WORKSPACE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class PageLists:
    """A step's page table as the wrappers want it.

    Attributes:
        indptr: host int32 [batch + 1], page counts accumulated.
        indices: int32 [indptr[-1]] on the device, live pages only.
        last_page_len: host int32 [batch], tokens in each row's last page.
        seq_lens: host int32 [batch].
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    seq_lens: torch.Tensor


def page_lists(step: Step, page_size: int) -> PageLists:
    """Flatten the step's page table by its host lengths, without a device synchronisation.

    Raises:
        ContractError: the engine gave no host lengths, or the table is narrower than a length needs.
    """
    import torch

    if step.host_kv_lens is None:
        raise ContractError(
            "host_kv_lens", "the plan needs the KV lengths on the host, and the step has none"
        )
    lens = torch.tensor(step.host_kv_lens, dtype=torch.int32)
    pages = (lens + (page_size - 1)) // page_size
    width = step.page_table.shape[1]
    if int(pages.max()) > width:
        raise ContractError(
            "table_width",
            f"kv_len {int(lens.max())} needs {int(pages.max())} pages and the page table holds {width}",
        )
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
    torch.cumsum(pages, 0, dtype=torch.int32, out=indptr[1:])
    total = int(indptr[-1])
    device = step.page_table.device
    starts = torch.arange(len(lens), dtype=torch.int64) * width - indptr[:-1]
    # output_size spares repeat_interleave the synchronisation that would find it
    shift = torch.repeat_interleave(starts.to(device), pages.to(device), output_size=total)
    places = torch.arange(total, dtype=torch.int64, device=device) + shift
    table = step.page_table.contiguous().view(-1)
    return PageLists(indptr, table.index_select(0, places), lens - (pages - 1) * page_size, lens)


class PlannedSession:
    """Plans in ``prepare``, launches in ``run``. Subclasses say which wrapper and which arguments.

    A wrapper in graph mode is bound to one batch size, so there is one for each that the session meets; they
    share workspaces and index buffers, since only the step prepared last may run.
    """

    def __init__(self, capacity: Capacity, allocate: Allocate, query_dtype: torch.dtype) -> None:
        import torch

        column, batch = capacity.column, capacity.max_batch_size
        self._capacity = capacity
        self._query = Query(capacity, allocate, query_dtype, strided=True)
        self._float_workspace = allocate("workspace", (WORKSPACE_BYTES,), torch.uint8)
        self._int_workspace = allocate("int_workspace", (INT_WORKSPACE_BYTES,), torch.uint8)
        # documented as wanted by the decode wrapper; harmless for the other
        self._int_workspace.zero_()
        self._indptr = allocate("kv_indptr", (batch + 1,), torch.int32)
        self._indices = allocate("kv_indices", (batch * column.table_width,), torch.int32)
        self._last_page_len = allocate("last_page_len", (batch,), torch.int32)
        self._qo_indptr = allocate("qo_indptr", (batch + 1,), torch.int32)
        uniform_offsets(self._qo_indptr, column.q_len)
        self._wrappers: dict[int, Any] = {}
        self._wrapper: Any = None
        self._call: Call | None = None

    def wrapper_call(self, batch: int) -> Call:
        """The constructor's call for one batch size."""
        raise NotImplementedError

    def plan_call(self, step: Step, lists: PageLists) -> Call:
        """The call of ``plan``."""
        raise NotImplementedError

    def run_call(self, step: Step, query: torch.Tensor) -> Call:
        """The call of ``run``, less its output."""
        raise NotImplementedError

    def _open(self, batch: int) -> Any:
        call = self.wrapper_call(batch)
        wrapper = resolve(call.target.removesuffix(".__init__"))(*call.args, **call.kwargs)
        wrapper.reset_workspace_buffer(self._float_workspace, self._int_workspace)
        return wrapper

    def prepare(self, step: Step) -> None:
        """Plan the step. Raises ``ContractError``."""
        column = self._capacity.column
        check_rows(column, self._capacity, step)
        batch = step.batch_size
        if batch not in self._wrappers:
            self._wrappers[batch] = self._open(batch)
        self._wrapper = self._wrappers[batch]
        plan = self.plan_call(step, page_lists(step, column.shape.page_size))
        self._wrapper.plan(*plan.args, **plan.kwargs)
        self._call = self.run_call(step, self._query.load(step))

    def run(self, out: torch.Tensor) -> None:
        """Launch the planned step into ``out``."""
        if self._call is None:
            raise RuntimeError("run() before prepare()")
        self._query.run()
        self._wrapper.run(*self._call.args, **self._call.kwargs, out=out)

    def close(self) -> None:
        """Drop every buffer and wrapper."""
        self.__dict__.clear()
