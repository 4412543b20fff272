"""Records a panel of cells in several fresh processes, for what a study by itself cannot show.

    python benchmarks/record_rounds.py --gpu h200 --routes xqa-decode,fmha-v2,fa2 --out rounds.jsonl
    python benchmarks/record_rounds.py --gpu cpu --cells 4 --rounds 16 --out rounds.jsonl

A study stops a cell as soon as it is decided, throws its first rounds away, and mostly times it in one
process. Here every cell of a panel gets the same number of rounds in each of ``--processes`` new children,
and the rounds of the start-up are kept. Round i has the same lengths, pages and order of routes in every
process, so that two processes can be compared round by round. Nothing is proven first: run it where the
routes have been. ``noise.py`` and ``regret.py --oracle`` read what it writes.

The panel is drawn by ``--seed``: first one cell for each value of each axis (shape, dtypes, q_len, batch, KV
row), then others; cells that the cost model puts at more than the time for one cell are not drawn. A process
has its share of ``--seconds``, and takes its cells in an order of its own: what it cannot reach is noted.

Lines of the output, JSON each: ``kind`` is ``header`` (``device``, ``facts``, ``gpu``, ``engine``,
``routes``, ``seed``, ``settings``, ``panel``: the cells), ``rounds`` (``process``, ``cell``, ``chunk``,
``start_up``, ``rounds``) or ``note`` (``process``, ``cell``, ``text``). A line is written as soon as it is
known. Exit 0 if every cell was recorded in every process, 1 if not, 2 for a wrong flag, 3 if this is not that
machine.
"""

# ruff: noqa: T201 - progress on stderr
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import IO, TYPE_CHECKING, Any

from autotune.bench.record import CHUNK, MIN_GROUP_MS, RoundSettings
from autotune.hardware.errors import HardwareError
from autotune.hardware.memory import too_large
from autotune.space.errors import SpaceError
from autotune.tuner.book import TIMING
from autotune.tuner.cost import COEFFICIENTS, predict
from autotune.tuner.lineup import line_up
from autotune.tuner.prover import seed_of
from autotune.tuner.trouble import explain
from autotune.worker.base import Completed, WorkerError
from autotune.worker.worker import Worker
from benchmarks.record_job import RecordJob

if TYPE_CHECKING:
    from autotune.domain.cell import Cell, Column
    from autotune.routes.base import Route
    from autotune.tuner.target import Target

STEP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What is recorded: each of ``panel`` with its routes, ``processes`` times."""

    panel: tuple[tuple[Cell, tuple[str, ...]], ...]
    processes: int
    settings: RoundSettings
    seed: int
    seconds: float


def axes(cell: Cell) -> tuple[object, ...]:
    """The cell's value on each axis of a space."""
    column = cell.column
    return (column.shape, column.dtypes, column.q_len, column.batch_size, cell.kv_high)


def draw(cells: Sequence[Cell], count: int, seed: int) -> list[Cell]:
    """``count`` of ``cells`` by ``seed``: values of axes that are not there yet first, then any.

    Fewer where there are not so many. Equal arguments give equal panels.
    """
    waiting = sorted(cells, key=lambda cell: cell.id)
    Random(f"panel:{seed}").shuffle(waiting)
    panel: list[Cell] = []
    seen: set[tuple[int, object]] = set()
    while waiting and len(panel) < count:
        # max keeps the first of equals, so the shuffle decides among them
        best = max(waiting, key=lambda cell: len(set(enumerate(axes(cell))) - seen))
        waiting.remove(best)
        panel.append(best)
        seen |= set(enumerate(axes(best)))
    return panel


def lined_up(target: Target, routes: Mapping[str, Route], column: Column) -> tuple[str, ...]:
    """The routes that can run the column here, the fallback first."""
    found = line_up(column, routes, target.engine, target.arch, target.facts, probe=lambda _: True)
    return tuple(route.name for route in found.runners)


def panel_of(
    target: Target, routes: Mapping[str, Route], count: int, rounds: int, most_s: float, seed: int
) -> list[tuple[Cell, tuple[str, ...]]]:
    """Cells that two routes and more can run and that take less than ``most_s`` seconds, as predicted."""
    fitting: dict[Cell, tuple[str, ...]] = {}
    columns: dict[Column, tuple[str, ...]] = {}
    device = target.facts.device
    for item in target.grid.cells:
        cell = item.cell
        if _seconds(cell, device, len(routes), rounds) > most_s or _too_large(target, cell):
            continue
        if cell.column not in columns:
            columns[cell.column] = lined_up(target, routes, cell.column)
        if len(columns[cell.column]) > 1:
            fitting[cell] = columns[cell.column]
    return [(cell, fitting[cell]) for cell in draw(list(fitting), count, seed)]


def _seconds(cell: Cell, device: str, routes: int, rounds: int) -> float:
    """Predicted. The model has its own number of rounds; scaling its set-up along errs on the safe side."""
    typical = COEFFICIENTS[device].rounds + RoundSettings().discard_rounds
    return predict(cell, device, routes) * max(1.0, rounds / typical)


def _too_large(target: Target, cell: Cell) -> bool:
    memory = target.memory_gib
    return memory is not None and bool(too_large(cell, memory, workspace_bytes=target.engine.workspace_bytes))


def record(plan: Plan, target: Target, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The lines after the header.

    Raises:
        WorkerError: no child can be had.
    """
    for process in range(plan.processes):
        started = time.monotonic()
        own = list(plan.panel)
        Random(f"order:{plan.seed}:{process}").shuffle(own)
        done = 0
        # what is timed runs as it is served: on the library's own allocations
        with Worker(target.device, guard_allocations=False, step_timeout_s=STEP_TIMEOUT_S) as worker:
            for cell, names in own:
                left = plan.seconds / plan.processes - (time.monotonic() - started)
                if left <= 0.0:
                    yield _note(process, cell, "its process had no time left")
                    continue
                job = RecordJob(
                    routes=names,
                    cell=cell.to_dict(),
                    facts=target.facts.to_dict(),
                    seed=seed_of(plan.seed, cell.id, TIMING),
                    device=target.device,
                    settings=asdict(plan.settings),
                )
                outcome = worker.run(job, timeout_s=left)
                if not isinstance(outcome, Completed):
                    yield _note(process, cell, explain(outcome))
                    continue
                done += 1
                yield {
                    "kind": "rounds",
                    "process": process,
                    "cell": cell.to_dict(),
                    "chunk": plan.settings.chunk,
                    **outcome.value,
                }
        say(f"process {process}: {done} of {len(own)} cells in {time.monotonic() - started:.0f} s")


def _note(process: int, cell: Cell, text: str) -> dict[str, Any]:
    return {"kind": "note", "process": process, "cell": str(cell), "text": text}


def write(lines: Iterator[dict[str, Any]], out: IO[str]) -> bool:
    """Write each line as it comes. Returns whether none of them is a note."""
    whole = True
    for line in lines:
        whole &= line["kind"] != "note"
        out.write(json.dumps(line, separators=(",", ":")) + "\n")
        out.flush()
    return whole


def main(arguments: list[str]) -> int:
    """Record and say how far it got."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", metavar="NAME", help="a profile, as for autotune run")
    parser.add_argument("--space", type=Path, metavar="FILE", help="instead of the profile's own space")
    parser.add_argument("--engine", default="generic")
    parser.add_argument("--routes", metavar="A,B", help="all that are installed if left out")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--cells", type=int, default=40)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=64, help="counted ones, in each process")
    parser.add_argument("--seconds", type=float, default=300.0, help="for everything")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if min(options.cells, options.processes, options.rounds) < 1 or options.seconds <= 0:
        parser.error("--cells, --processes and --rounds must be at least 1, --seconds positive")

    from autotune.cli.context import all_routes, ask, here
    from autotune.cli.exits import CliError

    try:
        asked = ask(options.gpu, options.engine, options.space)
        target = here(asked)
        routes = all_routes(target.device, options.routes)
        device = target.facts.device
        settings = RoundSettings(
            min_group_ms=MIN_GROUP_MS[device], chunk=CHUNK[device], max_rounds=options.rounds
        )
        # twice as long on average, and the start of a child besides, still fits
        most_s = 0.5 * options.seconds / options.processes / options.cells
        panel = panel_of(target, routes, options.cells, options.rounds, most_s, options.seed)
        if not panel:
            raise CliError(f"no cell of {asked.profile} can be timed here in {most_s:.1f} s; more --seconds")
        plan = Plan(tuple(panel), options.processes, settings, options.seed, options.seconds)
        header = {
            "kind": "header",
            "device": str(target.facts.hardware.get("name", device)),
            "facts": target.facts.to_dict(),
            "gpu": asked.profile,
            "engine": target.engine.name,
            "routes": sorted({name for _, names in panel for name in names}),
            "seed": options.seed,
            "settings": asdict(settings),
            "panel": [str(cell) for cell, _ in panel],
        }
        with options.out.open("w", encoding="utf-8") as out:
            write(iter([header]), out)
            whole = write(record(plan, target, lambda text: print(text, file=sys.stderr)), out)
    except CliError as error:
        print(f"record_rounds: {error}", file=sys.stderr)
        return int(error.code)
    except (SpaceError, HardwareError) as error:
        print(f"record_rounds: {error}", file=sys.stderr)
        return error.exit_code
    except (WorkerError, OSError) as error:
        print(f"record_rounds: {error}", file=sys.stderr)
        return 1
    if len(panel) < options.cells:
        print(f"the panel has {len(panel)} cells: no more fit", file=sys.stderr)
    return 0 if whole else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
