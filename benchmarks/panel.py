"""A panel of cells, drawn before anything of them is known, for a second study to be held against the first.

    python benchmarks/panel.py --gpu h200 --engine sglang,generic --count 200 > benchmarks/panels/h200-200.txt
    autotune run --gpu h200 --engine sglang,generic --cells benchmarks/panels/h200-200.txt --db sqlite:///second.db
    python benchmarks/agreement.py FIRST second.db --engine sglang

Every value of every axis (shape, dtypes, q_len, batch, KV row) is drawn about equally often, whatever the
engine's traffic: cells one after the other, each the one whose values are the rarest so far, a seeded shuffle
deciding among equals. Cells too large for the device are left out. Equal arguments print equal files.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from autotune.cli.context import ask
from autotune.cli.exits import CliError
from autotune.hardware.memory import too_large
from autotune.space.errors import SpaceError
from benchmarks.record_rounds import axes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.domain.cell import Cell

AXES = ("shape", "dtypes", "q_len", "batch", "kv row")


def spread(cells: Sequence[Cell], count: int, seed: int) -> list[Cell]:
    """``count`` of ``cells``, all if there are fewer: the values of each axis about equally often."""
    waiting = sorted(cells, key=lambda cell: cell.id)
    Random(f"panel:{seed}").shuffle(waiting)
    numbers: dict[tuple[int, object], int] = {}  # of values
    rows = [[numbers.setdefault(each, len(numbers)) for each in enumerate(axes(cell))] for cell in waiting]
    values = np.array(rows, dtype=np.int64).reshape(len(rows), len(AXES))
    seen = np.zeros(len(numbers), dtype=np.int64)
    drawn = np.zeros(len(rows), dtype=bool)
    panel: list[Cell] = []
    for _ in range(min(count, len(waiting))):
        # argmin gives the first of equals: the shuffle decides. Squares: one frequent value weighs more than
        # several that are a little frequent
        often = (seen[values] ** 2).sum(axis=1)
        often[drawn] = np.iinfo(np.int64).max
        best = int(often.argmin())
        drawn[best] = True
        panel.append(waiting[best])
        seen[values[best]] += 1
    return panel


def counts(panel: Sequence[Cell]) -> list[tuple[str, int, int, int]]:
    """By axis: how many values, and how often the rarest and the most frequent of them were drawn."""
    found = []
    for place, name in enumerate(AXES):
        often = Counter(axes(cell)[place] for cell in panel)
        found.append((name, len(often), min(often.values()), max(often.values())))
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Print the panel, as ``--cells`` reads it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", metavar="NAME", help="a profile, as for autotune run")
    parser.add_argument("--space", type=Path, metavar="FILE", help="instead of the profile's own space")
    parser.add_argument("--engine", default="generic")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(given)
    try:
        grid = ask(options.gpu, options.engine, options.space).grid
    except (CliError, SpaceError) as error:
        print(f"panel: {error}", file=sys.stderr)
        return 2
    memory, workspace = grid.space.device.memory_gib, grid.engine.workspace_bytes
    cells = [
        item.cell
        for item in grid.cells
        if not memory or not too_large(item.cell, memory, workspace_bytes=workspace)
    ]
    panel = spread(cells, options.count, options.seed)
    print(f"# {len(panel)} of {len(cells)} cells of --gpu {grid.space.gpu} --engine {options.engine}")
    print(f"# drawn by benchmarks/panel.py --count {options.count} --seed {options.seed}")
    for name, values, least, most in counts(panel):
        print(f"# {name}: {values} values, {least} to {most} times each")
    for cell in panel:
        print(f"{cell.id}  # {cell}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
