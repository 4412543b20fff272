"""What ``--strategy`` and ``--traffic`` need: the flags that go together, and the weights of cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.cli.exits import CliError, Exit
from autotune.cli.options import SearchName

if TYPE_CHECKING:
    from pathlib import Path

    from autotune.space.grid import Grid
    from autotune.space.traffic import Weights


def require_search(strategy: SearchName, budget: str | None, traffic: Path | None) -> None:
    """Refuse flags that contradict each other.

    Raises:
        CliError: adaptive without a budget, or a traffic file that nothing would read (exit 2).
    """
    if strategy is SearchName.ADAPTIVE:
        if budget is None:
            raise CliError(
                "--strategy adaptive needs --budget, such as 10m: it spends one on what gains most",
                Exit.USAGE,
            )
    elif traffic is not None:
        raise CliError(
            "--traffic weighs the cells of --strategy adaptive; exhaustive settles all of them", Exit.USAGE
        )


def weights(grid: Grid, traffic: Path) -> Weights:
    """Weights of the grid's cells; what the file covers is said on stderr.

    Raises:
        SpaceError: the file cannot be read or has a malformed line (exit 2).
        CliError: none of its calls is in a cell (exit 2).
    """
    from autotune.cli.output import note
    from autotune.space.traffic import read_traffic, weigh

    found = weigh(read_traffic(traffic), (item.cell for item in grid.cells))
    if not found.by_cell:
        raise CliError(
            f"{traffic}: none of its {found.calls} calls is in a cell of the space (see autotune plan)",
            Exit.USAGE,
        )
    note(found.said)
    return found
