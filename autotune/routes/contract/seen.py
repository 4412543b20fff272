"""The look of a call that broke no rule: a call that looks the same breaks none either.

Everything that a rule looks at on level ``static`` is compared, so that nothing is let through that the rules
would refuse; what cannot be compared cheaply is left to the rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from autotune.routes.base import Step


def _blocks(step: Step) -> object:
    """What the rules look at of NVFP4 block scales."""
    blocks = step.kv_block_scales
    return None if blocks is None else [(part.shape, part.dtype, part.device) for part in blocks]


class Seen:
    """One call that every rule let through.

    Args:
        longest: most tokens of a request for which every rule holds. Lengths that are not on the host may
            reach ``max_seq_len``.
        unit: the kernel's alignment less 1.
    """

    __slots__ = (
        "_blocks",
        "_device",
        "_dtypes",
        "_has_out",
        "_host",
        "_longest",
        "_numbers",
        "_out",
        "_q_len",
        "_shapes",
        "_sinks",
        "_strides",
        "_unit",
    )

    def __init__(self, step: Step, out: torch.Tensor | None, *, longest: int, unit: int) -> None:
        q, k, v, table, lens = step.q, step.k, step.v, step.page_table, step.seq_lens
        self._shapes = (q.shape, k.shape, v.shape, table.shape)
        self._strides = (q.stride(), k.stride(), v.stride())
        self._dtypes = (q.dtype, k.dtype, v.dtype, table.dtype, lens.dtype)
        self._device = q.device
        self._numbers = (step.q_len, step.max_seq_len, step.sm_scale, step.k_scale, step.v_scale)
        self._q_len = step.q_len
        self._sinks = None if step.sinks is None else (step.sinks.shape, step.sinks.dtype, step.sinks.device)
        self._blocks = _blocks(step)
        self._has_out = out is not None
        self._out = None if out is None else (out.shape, out.dtype)
        self._host: tuple[int, ...] | None = None
        self._longest = longest
        self._unit = unit

    @staticmethod
    def can(step: Step) -> bool:
        """Whether such a call can be recognised: a scale in a tensor has to be looked at by the rules."""
        return type(step.sm_scale) is type(step.k_scale) is type(step.v_scale) is float

    def again(self, step: Step, out: torch.Tensor | None) -> bool:
        """Whether ``step`` looks the same; its ``seq_lens`` have the same shape."""
        q, k, v, table, lens = step.q, step.k, step.v, step.page_table, step.seq_lens
        device = self._device
        if not (
            (q.shape, k.shape, v.shape, table.shape) == self._shapes
            and (q.stride(), k.stride(), v.stride()) == self._strides
            and table.is_contiguous()  # as their rules ask, and half the price of a stride
            and lens.is_contiguous()
            and (q.dtype, k.dtype, v.dtype, table.dtype, lens.dtype) == self._dtypes
            and q.device == device
            and k.device == device
            and v.device == device
            and table.device == device
            and lens.device == device
            # types first: to compare a tensor is to launch a kernel
            and type(step.sm_scale) is type(step.k_scale) is type(step.v_scale) is float
            and (step.q_len, step.max_seq_len, step.sm_scale, step.k_scale, step.v_scale) == self._numbers
        ):
            return False
        if out is None:
            if self._has_out:
                return False
        elif (out.shape, out.dtype) != self._out or out.device != device or not out.is_contiguous():
            return False
        sinks = step.sinks
        if (None if sinks is None else (sinks.shape, sinks.dtype, sinks.device)) != self._sinks:
            return False
        if (step.kv_block_scales is not None or self._blocks is not None) and _blocks(step) != self._blocks:
            return False
        if self._unit:
            places = q.data_ptr() | k.data_ptr() | v.data_ptr()
            if (places if out is None else places | out.data_ptr()) & self._unit:
                return False
        host = step.host_kv_lens
        if host is None:
            return step.max_seq_len <= self._longest
        if host is self._host:
            return True  # the layers of one step share one tuple, which nobody can have changed
        if type(host) is not tuple or len(host) != lens.shape[0]:
            return False
        if min(host) < self._q_len or max(host) > self._longest:
            return False
        self._host = host
        return True
