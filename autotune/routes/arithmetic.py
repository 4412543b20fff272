"""In which types a kernel holds what it does not return: what its error bound follows from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Types in which a kernel holds what it does not return.

    A route whose kernel departs from these says so with an attribute ``arithmetic``: an
    :class:`Arithmetic`, or a method ``arithmetic(column, facts)`` that returns one where it depends on the
    column (XQA's Hopper fp8 kernel). The bound of ``checks.oracle`` widens by exactly that rounding.

    Attributes:
        logits: q.k before the softmax.
        weights: the softmax's result as it feeds the second product; None: the finer of the query's and the
            KV's types.
        partials: per-split outputs before they are merged.
        query: the query as it feeds the first product; None: the query's own type. ``e4m3`` where the
            route or its kernel quantises it.
        cache: what K and V are rounded to on their way into the products; None: they are used as stored, or
            widened exactly. ``e4m3`` where an nvfp4 code times its block's scale must fit into one.
    """

    logits: str = "fp32"
    weights: str | None = None
    partials: str = "fp32"
    query: str | None = None
    cache: str | None = None
