"""What the launches that are timed write: looked at after each chunk of rounds, untimed.

Proofs launch a route a few hundred times, timing many thousand times, from graphs over several operand sets.
So every live route launches once more as it is timed, over poisoned outputs and on the operands of the last
round; what it writes is compared with what the first live route (the fallback) writes. Where two differ by
more than both may err, the fp64 oracle says which of them is wrong: the fallback is accused as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from autotune.arena.nvfp4 import interleaves_v_scales
from autotune.arena.operands import Operands, Recipe, pages_of
from autotune.bench.clock import BenchError, Launch, TimingFindingError, accusing
from autotune.bench.record import Finding
from autotune.checks import oracle
from autotune.checks.launch import arithmetic_of
from autotune.checks.poison import poisoned
from autotune.domain.verdict import FailureKind

if TYPE_CHECKING:
    from autotune.bench.clock import Stand
    from autotune.domain.cell import Cell
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Route


class Outputs:
    """Compares the live routes' outputs in one cell.

    Attributes:
        interleaved_v_scales: how the cell's operands store V's block scales.

    Raises:
        NotImplementedError: the error of the cell's dtypes has no bound.
    """

    def __init__(self, cell: Cell, facts: Facts, routes: Sequence[Route], device: str) -> None:
        self._cell = cell
        self._device = device
        self.interleaved_v_scales = interleaves_v_scales(cell.column, facts)
        self._bounds = {
            route.name: oracle.bound(cell.column, arithmetic_of(route, cell.column, facts))
            for route in routes
        }

    def look(
        self, stands: Mapping[str, Stand], live: Sequence[str], launching: Callable[[str], None]
    ) -> None:
        """Launch every live route and compare; ``live`` begins with the fallback.

        Raises:
            TimingFindingError: a route raised, left an element unwritten, wrote one that is not finite, or is
                wrong.
            BenchError: a route's graph computes something else on another operand set with the same contents.
        """
        first: torch.Tensor | None = None
        for name in live:
            launching(name)
            with accusing(name, self._device):
                sets = stands[name].rerun()
            launching("")
            self._written(name, sets[0])
            out = sets[0].out
            if first is None:
                first = out.clone()
            else:
                difference = oracle.worst(out, first.to(torch.float64)).error
                if difference > self._bounds[live[0]] + self._bounds[name]:
                    self._judge(sets[0], {live[0]: first, name: out.clone()})
            self._alike(name, sets)

    def _written(self, name: str, launch: Launch) -> None:
        """Every element is written and finite."""
        finite = torch.isfinite(launch.out)
        if bool(finite.all()):
            return
        left = poisoned(launch.out)
        bad, kind, what = (
            (left, FailureKind.UNWRITTEN_OUTPUT, "left unwritten")
            if bool(left.any())
            else (~finite, FailureKind.NAN_LEAK, "not finite")
        )
        row, head, _ = (int(i) for i in bad.nonzero()[0])
        count = f"{int(bad.sum())} of {bad.numel()} elements {what}"
        raise TimingFindingError(Finding(name, kind, f"{count}, first at {self._place(launch, row, head)}"))

    def _alike(self, name: str, sets: Sequence[Launch]) -> None:
        """Sets that are launched on together hold the same values, so their outputs are alike.

        Nobody is accused: only the first set's session was prepared, that it prepares the others is our
        construction. But launches that did other work than the first must not be timed as if they had not.
        """
        if len(sets) == 1:
            return
        others = torch.stack([launch.out for launch in sets[1:]])
        difference = float("inf")
        if bool(torch.isfinite(others).all()):
            same = sets[0].out.expand_as(others).flatten(0, 1)
            difference = oracle.worst(others.flatten(0, 1), same.to(torch.float64)).error
        if difference > 2 * self._bounds[name]:
            raise BenchError(
                f"{name}: a replay differs by {difference:.3g} between sets of the same operands: its "
                f"sessions do not keep all that they prepare in the buffers that they share"
            )

    def _judge(self, launch: Launch, outs: Mapping[str, torch.Tensor]) -> None:
        """Accuse the first of ``outs`` that the oracle finds wrong; if it finds none, nobody is."""
        column, step = self._cell.column, launch.step
        kv_lens = tuple(step.seq_lens.tolist())
        pages = [
            row[: pages_of(kv_len, column.shape.page_size)]
            for row, kv_len in zip(step.page_table.tolist(), kv_lens, strict=True)
        ]
        recipe = Recipe(kv_lens, seed=0, interleaved_v_scales=self.interleaved_v_scales)
        ref = oracle.reference(Operands(column, recipe, step, launch.out, pages))
        for name, out in outs.items():
            found = oracle.worst(out, ref)
            if found.error > self._bounds[name]:
                where = self._place(launch, found.row, found.head)
                text = f"error {found.error:.3g} > bound {self._bounds[name]:.3g} at {where}"
                raise TimingFindingError(Finding(name, FailureKind.WRONG_OUTPUT, text))

    def _place(self, launch: Launch, row: int, head: int) -> str:
        """A row of ``out`` in words."""
        request, query = divmod(row, self._cell.column.q_len)
        kv_len = int(launch.step.seq_lens[request])
        return f"request {request} query {query} head {head}, kv_len {kv_len}, while timing {self._cell}"
