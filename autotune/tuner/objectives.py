"""What a study resolves in each cell: its declared objectives, with the layers of the models that call it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from autotune.bench.objective import Objective, graph, step

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.dtypes import DTypes
    from autotune.domain.shape import Shape
    from autotune.space.grid import Entry, Grid

GRAPH, STEP = "graph", "step"

_Key = tuple["Shape", "DTypes", int]


class Objectives:
    """The declared objectives by name, in order; the first decides the table.

    ``step`` counts one ``prepare``, of which the engine hides nothing unless told, and the calls of all
    layers. An entry that several models share is judged with the layers of the one that has the fewest: it
    feels the preparation most.

    Args:
        names: as the space declares them.
        entries: where the layers of each column's models stand.
        chosen_layers: layers that ``step`` counts instead, in every column.
        hidden: share of ``prepare`` that ``step`` takes for hidden by the engine, 0 .. 1.

    Raises:
        ValueError: an objective that this version does not know, or none; a value that makes no sense.
    """

    def __init__(
        self,
        names: Sequence[str],
        entries: Iterable[Entry],
        *,
        chosen_layers: int | None = None,
        hidden: float = 0.0,
    ) -> None:
        unknown = [name for name in names if name not in (GRAPH, STEP)]
        if unknown or not names:
            raise ValueError(f"objectives must be of {GRAPH}, {STEP}, not {list(names)}")
        step(1 if chosen_layers is None else chosen_layers, hidden)
        self.names = tuple(names)
        self.chosen_layers = chosen_layers
        self.hidden = hidden
        self._layers: dict[_Key, int] = {}
        for entry in entries:
            self._layers[entry.shape, entry.dtypes, entry.q_len] = min(entry.layers.values())

    @classmethod
    def of_grid(cls, grid: Grid) -> Objectives:
        """Those of a grid's space."""
        return cls(grid.space.objectives, grid.entries)

    def weighed(self, layers: int | None, hidden: float) -> Objectives:
        """The same, with ``step`` counting ``layers`` (None: the models' own) and so much of it hidden.

        Raises:
            ValueError: fewer than one layer, or a share outside 0..1.
        """
        other = Objectives(self.names, (), chosen_layers=layers, hidden=hidden)
        other._layers = self._layers
        return other

    @property
    def first(self) -> str:
        """The one that the table is decided by, unless another is asked for."""
        return self.names[0]

    def layers(self, column: Column) -> int:
        """Layers that ``step`` counts in ``column``."""
        return self.chosen_layers or self._layers[column.shape, column.dtypes, column.q_len]

    def weighs(self, name: str, column: Column) -> bool:
        """Whether an objective can be asked in ``column``: ``step`` needs the layers of a model there."""
        key = (column.shape, column.dtypes, column.q_len)
        return name == GRAPH or self.chosen_layers is not None or key in self._layers

    def one(self, name: str, column: Column) -> Objective:
        """One of them.

        Raises:
            KeyError: see :meth:`weighs`.
        """
        return graph if name == GRAPH else step(self.layers(column), self.hidden)

    def of(self, column: Column) -> Mapping[str, Objective]:
        """Each by its name, in order."""
        return {name: self.one(name, column) for name in self.names}
