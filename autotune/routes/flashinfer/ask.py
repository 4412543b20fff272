"""Which modules a run will ask for: asked of the library itself, in the process that calls this."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from autotune.domain.cell import Column
from autotune.routes.base import Capacity
from autotune.routes.flashinfer.example import example_step
from autotune.routes.flashinfer.nogpu import Silent, no_gpu

if TYPE_CHECKING:
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Route

# No module's name or source depends on it; it only has to be a device that FlashInfer accepts.
SM_COUNT = 132


@dataclass(slots=True)
class Asked:
    """One module.

    Attributes:
        spec: the library's ``JitSpec``; builds it.
        routes: names of the routes that load it.
        head_dims: the only head sizes it was generated for; () where its name says so already.
    """

    spec: Any
    routes: set[str] = field(default_factory=set)
    head_dims: tuple[int, ...] = ()


def smallest(column: Column) -> Column:
    """The column that stands for all that ask for the same modules: batch, context, padding never count."""
    context = -(-column.q_len // column.shape.page_size) * column.shape.page_size
    return replace(column, batch_size=1, max_context=context, interval=None, pad_value=1)


def distinct(columns: Iterable[Column]) -> list[Column]:
    """Columns that can differ in their modules, the smallest of each kind."""
    return list(dict.fromkeys(smallest(column) for column in columns))


def pairs(
    columns: Iterable[Column], routes: Sequence[Route], facts: Facts, *, selftest: bool = False
) -> list[tuple[Route, Column]]:
    """What there is to ask: each route with the distinct columns that it supports on ``facts``.

    Args:
        selftest: with the column on which the self-test runs the real XQA kernel, whatever the space holds.
    """
    found = [
        (route, column)
        for column in distinct(columns)
        for route in routes
        if route.supports(column, facts) is None
    ]
    if selftest:
        from autotune.routes.planted_xqa import COLUMN

        found += [
            (route, smallest(COLUMN))
            for route in routes
            if route.name == "xqa-decode" and route.supports(COLUMN, facts) is None
        ]
    return list(dict.fromkeys(found))


@contextmanager
def only_kernels(head_dims: Sequence[int], soft_cap: bool) -> Iterator[None]:
    """Let fmha-v2 generate kernels for these head sizes alone, and only variants that routes use.

    By default it generates every head size, ALiBi, soft cap, statistics and skip-softmax variant: 134
    sources for a module of which a run uses one or two.
    """
    from flashinfer.jit.attention.fmha_v2 import fmha_library

    valid = fmha_library.is_kernel_spec_valid

    def used(spec: Any) -> bool:
        return bool(
            valid(spec)
            and spec.head_size in head_dims
            and not spec.alibi
            and not spec.return_softmax_stats
            and not spec.enable_skip_softmax
            and (soft_cap or not spec.enable_attn_logit_softcapping)
        )

    with patch.object(fmha_library, "is_kernel_spec_valid", used):
        yield


def ask(
    wanted: Sequence[tuple[Route, Column]], facts: Facts, head_dims: Iterable[int] = ()
) -> dict[str, Asked]:
    """Modules by name, for routes in columns that they support on ``facts`` (:func:`pairs`).

    Args:
        head_dims: head sizes that fmha-v2's modules keep beside those of the columns: they were built
            before, and the name of such a module does not tell.

    Raises:
        ImportError: FlashInfer is not installed.
    """
    major, _, minor = str(facts.hardware["compute_capability"]).partition(".")
    fmha = [column.shape for route, column in wanted if route.name == "fmha-v2"]
    sizes = tuple(sorted({*head_dims, *(shape.head_dim for shape in fmha)}))
    asked: dict[str, Asked] = {}
    current = ""

    def load(spec: Any) -> Silent:
        entry = asked.setdefault(spec.name, Asked(spec))
        entry.routes.add(current)
        if current == "fmha-v2":
            entry.head_dims = sizes
        return Silent()

    def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    with only_kernels(sizes, any(shape.soft_cap for shape in fmha)):
        for route, column in wanted:
            current = route.name
            # entered anew each time: the library asks once for a module that two routes share
            with no_gpu((int(major), int(minor)), SM_COUNT, load):
                step, out = example_step(column, (column.max_context,))
                session = route.open(Capacity(column, 1, step.k.shape[0], "cpu"), allocate)
                session.prepare(step)
                session.run(out)
                session.close()
    return asked
