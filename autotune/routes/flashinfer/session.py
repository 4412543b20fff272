"""The session shared by the kernels that are plain functions (no plan, no wrapper)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.routes.flashinfer.call import Call, resolve
from autotune.routes.flashinfer.metadata import Query, StepBuffers, check_rows

if TYPE_CHECKING:
    import torch

    from autotune.routes.base import Allocate, Capacity, Step


class FunctionSession:
    """Prepares a :class:`Call` per step; ``run`` adds the output and launches it.

    Subclasses build the call in :meth:`build` from the session's own buffers.
    """

    target: str

    def __init__(self, capacity: Capacity, allocate: Allocate, query_dtype: torch.dtype) -> None:
        self._function: Callable[..., Any] = resolve(self.target)
        self._capacity = capacity
        self._steps = StepBuffers(capacity, allocate)
        self._query = Query(capacity, allocate, query_dtype)
        self._call: Call | None = None

    def build(self, step: Step, query: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor) -> Call:
        """The call of ``step``, less its output."""
        raise NotImplementedError

    def prepare(self, step: Step) -> None:
        """Copy the step's metadata to fixed addresses. Raises ``ContractError``."""
        check_rows(self._capacity.column, self._capacity, step)
        seq_lens, table = self._steps.load(step)
        self._call = self.build(step, self._query.load(step), seq_lens, table)

    def launch(self, call: Call, out: torch.Tensor) -> None:
        """Launch ``call`` into ``out``."""
        self._function(*call.args, **call.kwargs, out=out)

    def run(self, out: torch.Tensor) -> None:
        """Launch the prepared step into ``out``."""
        if self._call is None:
            raise RuntimeError("run() before prepare()")
        self._query.run()
        self.launch(self._call, out)

    def close(self) -> None:
        """Drop every buffer."""
        self.__dict__.clear()
