"""``check_step`` for one step; :class:`Contract` for an engine that makes the same call again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.routes.contract.call import Call, Level
from autotune.routes.contract.context import Context
from autotune.routes.contract.error import ContractError
from autotune.routes.contract.kernel import kernel_of
from autotune.routes.contract.rules import RULES
from autotune.routes.contract.seen import Seen

if TYPE_CHECKING:
    import torch

    from autotune.routes.base import Capacity, Route, Step

NOTHING_SAID = Context()


def check_step(
    capacity: Capacity,
    step: Step,
    *,
    level: Level | str,
    out: torch.Tensor | None = None,
    pad_value: int | None = None,
    max_offset: int | None = None,
    route: Route | str | None = None,
    context: Context | None = None,
    cached_lens: tuple[int, ...] | None = None,
    q_lens: tuple[int, ...] | None = None,
) -> None:
    """Check one step against every rule, in order.

    Args:
        level: ``full`` or ``static``; see :class:`Level`.
        out, pad_value, max_offset, cached_lens, q_lens: see :class:`Call`.
        route: whose kernel the operands go to as they are; None holds them to what every kernel asks. A
            session that copies or converts its operands is not held to its kernel's own rules.
        context: what else the caller knows; what is None there is held to nothing.

    Raises:
        ContractError: the first rule that is broken.
        ValueError: an unknown level.
    """
    level = Level(level)
    kv_lens = step.host_kv_lens
    if level is Level.FULL:
        kv_lens = tuple(step.seq_lens.tolist()) if step.seq_lens.dim() == 1 else None
    call = Call(
        capacity,
        step,
        level,
        kv_lens,
        out,
        pad_value,
        max_offset,
        route,
        kernel_of(route),
        NOTHING_SAID if context is None else context,
        cached_lens,
        q_lens,
    )
    for rule in RULES:
        if message := rule.check(call):
            raise ContractError(rule.name, message)


class Contract:
    """The contract of one layer kind's calls, for a serving process: level ``static``, bound once.

    A call that looks like the last right one of its batch size is let through by comparing shapes, strides,
    dtypes, devices, scalars, lengths on the host and alignment; anything else goes through every rule. Reads
    no tensor, launches nothing, never waits, imports no torch. Safe to share between threads.
    """

    __slots__ = ("_capacity", "_context", "_max_offset", "_pad_value", "_quick", "_route", "_seen", "_unit")

    def __init__(
        self,
        capacity: Capacity,
        *,
        route: Route | str | None = None,
        pad_value: int | None = None,
        max_offset: int | None = None,
        context: Context | None = None,
    ) -> None:
        """Arguments as :func:`check_step`'s."""
        self._capacity = capacity
        self._route = route
        self._pad_value = pad_value
        self._max_offset = max_offset
        self._context = NOTHING_SAID if context is None else context
        self._unit = kernel_of(route).alignment - 1
        # a captured graph is about addresses, and is checked once a replay: not worth a quick way
        self._quick = self._context.graph is None
        self._seen: dict[torch.Size, Seen] = {}

    def broken(
        self,
        step: Step,
        out: torch.Tensor | None = None,
        *,
        cached_lens: tuple[int, ...] | None = None,
        q_lens: tuple[int, ...] | None = None,
    ) -> ContractError | None:
        """The first rule that this call breaks, or None. Never raises: serving goes on with the fallback."""
        try:
            if cached_lens is None and q_lens is None:
                seen = self._seen.get(step.seq_lens.shape)
                if seen is not None and seen.again(step, out):
                    return None
            check_step(
                self._capacity,
                step,
                level=Level.STATIC,
                out=out,
                pad_value=self._pad_value,
                max_offset=self._max_offset,
                route=self._route,
                context=self._context,
                cached_lens=cached_lens,
                q_lens=q_lens,
            )
            if self._quick and Seen.can(step):
                self._seen[step.seq_lens.shape] = Seen(
                    step, out, longest=self._longest(step), unit=self._unit
                )
        except ContractError as error:
            return error
        except Exception as error:  # an operand that is none: whatever reading it does
            text = " ".join(str(error).split())[:200]
            return ContractError("operands", f"the call cannot be looked at: {type(error).__name__}: {text}")
        return None

    def check(self, step: Step, out: torch.Tensor | None = None) -> None:
        """Raises ``ContractError`` for the first rule that this call breaks."""
        if (error := self.broken(step, out)) is not None:
            raise error

    def _longest(self, step: Step) -> int:
        """Most tokens of a request of a step that broke no rule; see ``table_width`` and ``proven_box``."""
        page, proven = self._capacity.column.shape.page_size, self._context.proven
        most = min(step.page_table.shape[1] * page, step.max_seq_len)
        return most if proven is None else min(most, proven.max_kv_len)
