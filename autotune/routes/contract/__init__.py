"""What a call must satisfy before any kernel is launched: one small rule per way that calls went wrong.

The tuner holds its own operands to it, at level ``full``, which reads tensors: a rule that is broken there is
a check's fault. Level ``static`` is for a serving process (:class:`Contract`, which ``autotune.engines``
asks): it looks at shapes, strides, dtypes, addresses and host values only and never waits for a device.

``seq_lens`` are *total* lengths, the new tokens included, and those are already in the pool. Lengths alone
show it only where a total falls below ``q_len`` (``lengths``); a caller who says what each request held
before the step gets all of it checked (``new_tokens``).

Rules that only some kernels need are switched by :class:`Kernel`, and hold where operands go to that kernel
as they are: ``check_step(..., route="xqa-decode")``.

Imports no torch, so that whoever maps the error to an exit code does not pay for it, and nothing but
``autotune.domain``, so that a serving process can: it is handed tensors and reads their attributes.
"""

from __future__ import annotations

from autotune.routes.contract.call import SCALED, TORCH_NAMES, Call, Level, Rule
from autotune.routes.contract.check import Contract, check_step
from autotune.routes.contract.context import Buffers, Context, Graph, Plan, Proven
from autotune.routes.contract.error import ContractError
from autotune.routes.contract.kernel import ANY, GRID_LIMIT, KERNELS, Kernel, kernel_of
from autotune.routes.contract.rules import RULES

__all__ = [
    "ANY",
    "GRID_LIMIT",
    "KERNELS",
    "RULES",
    "SCALED",
    "TORCH_NAMES",
    "Buffers",
    "Call",
    "Context",
    "Contract",
    "ContractError",
    "Graph",
    "Kernel",
    "Level",
    "Plan",
    "Proven",
    "Rule",
    "check_step",
    "kernel_of",
]
