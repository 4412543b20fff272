"""What a caller knows besides the step itself. None everywhere means: not said, so nothing is held to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Step


@dataclass(frozen=True, slots=True)
class Plan:
    """What a wrapper's ``plan`` (or a compiled module) was made for; it must be what ``run`` is asked for."""

    q_len: int
    window_left: int
    soft_cap: float
    sinks: bool
    mask: str
    q: str
    kv: str
    out: str


@dataclass(frozen=True, slots=True)
class Buffers:
    """What the caller hands to the kernel itself.

    Attributes:
        workspace: scratch; a kernel's semaphores are in its head.
        counters: a counter buffer of its own, documented as zero between launches.
        mask: uint16 [batch, q_len, 2 x ceil(q_len / 32)], bit j of row i set where token i sees token j.
        mask_kind: ``causal``, ``full`` or ``tree``.
        others: scratch of other routes, wrappers or streams by name; none may share a byte with ours.
    """

    workspace: torch.Tensor | None = None
    counters: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    mask_kind: str = "causal"
    others: tuple[tuple[str, torch.Tensor], ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured call, before a replay of it.

    Attributes:
        addresses: operand name and address at capture.
        plan: plan info at capture, whatever the library gives; None if it has none.
        replanned: plan info made for this replay; None if nothing was planned for it.
    """

    batch_size: int
    addresses: tuple[tuple[str, int], ...]
    plan: object | None = None
    replanned: object | None = None

    @classmethod
    def of(cls, step: Step, out: torch.Tensor | None = None, plan: object | None = None) -> Graph:
        """What is to be remembered of a capture."""
        return cls(step.batch_size, addresses(step, out), plan, plan)


@dataclass(frozen=True, slots=True)
class Proven:
    """The box inside which a table names this route.

    Attributes:
        batch_sizes: captured sizes, each proven.
        intervals: eager intervals, whose ends are captured sizes.
        max_kv_len: longest KV of the proven rows.
    """

    batch_sizes: tuple[int, ...]
    max_kv_len: int
    intervals: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Context:
    """All of it.

    Attributes:
        facts: this machine; with it a route object is asked whether it supports the column.
        table_facts: what the table was measured on.
        digests: the table's digest on each rank, in rank order.
        current_device: index that the runtime launches on (``torch.cuda.current_device()``).
        q_scale: scale of a quantised query.
    """

    facts: Facts | None = None
    table_facts: Facts | None = None
    digests: tuple[str, ...] = ()
    proven: Proven | None = None
    plan: Plan | None = None
    buffers: Buffers | None = None
    graph: Graph | None = None
    current_device: int | None = None
    q_scale: float = field(default=1.0)


def addresses(step: Step, out: torch.Tensor | None) -> tuple[tuple[str, int], ...]:
    """Operand addresses that a captured graph keeps. Host values: nothing is read from the device."""
    named = [
        ("q", step.q),
        ("k", step.k),
        ("v", step.v),
        ("page_table", step.page_table),
        ("seq_lens", step.seq_lens),
    ]
    if out is not None:
        named.append(("out", out))
    return tuple((name, tensor.data_ptr()) for name, tensor in named)
