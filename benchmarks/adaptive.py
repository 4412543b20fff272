"""How soon a search has found most of what a table gains, on recorded time.

    python benchmarks/adaptive.py [--evidence FILE] [--engine sglang] [--traffic NAME] [--traffic-dir DIR]
        [--plot FILE]

Gain of a table: the sum over its cells of weight x log(fallback's time / time of the route that it names),
medians of the recorded rounds; a share is of what the table of every recorded cell gains. The curve of an
order is the gain of the table that an export would write at each moment. A letter of it is decided by the
first objective (``graph``) at the margins of the recording's own tau; a cell of which ``step`` wants more
rounds than were recorded has its letter, and is charged all rounds that there are. Time is recorded time
(autotune/replay/seconds.py), without the second processes, which no order asks for or pays. Cells without a
recorded round are left out. No device is needed.

Orders:

    adaptive   ``--strategy adaptive`` on the real tuner, weighed by the traffic, until everything is settled
    cheapest   what ``--strategy exhaustive`` does: cheapest column first by the cost model
    grid       as the space lists its cells
    random     mean over 20 shuffles (seeds 0 to 19) of whole cells
    oracle     knows every gain and every cost; proves and times only the winner beside the fallback, and only
               cells that gain: the prefix of a column's cells with the most gain per second first, its proof
               counted once. Greedy, so within one column's cost of the exact knapsack

All are charged alike, as a replay charges: a proof once, and rounds of the routes that race until every
objective is final. Cheapest, grid and random race all routes.

Traffic, written as ``DIR/<name>.jsonl`` in the format of an engine's own counts:

    uniform     one call a (batch, q_len, KV row) of the space
    fleet       many servers: batch sizes fall off as 1 / batch, q_len 1 to 8 as 1 / q_len, KV lengths as
                exp(-(log2(kv) - 12)^2 / 8), a bell round 4,096 tokens
    one-server  one deployment: q_len 4, batch 1 to 8, KV up to 16,384, each of these equally often
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log2
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.bench.eprocess import SignTest, Unit
from autotune.cli.context import all_routes, ask, target
from autotune.domain.traffic import ShapeCount
from autotune.domain.verdict import Status, Verdict
from autotune.replay.pace import RecordedPace
from autotune.replay.read import read_recording
from autotune.replay.replay import gain_of, replay
from autotune.replay.routes import recorded_routes
from autotune.space.traffic import weigh
from autotune.tuner.decide import plan_next
from autotune.tuner.objectives import Objectives
from autotune.tuner.run import ALPHA
from autotune.tuner.standing import Candidate, Evidence, Question

if TYPE_CHECKING:
    from autotune.domain.cell import Cell, Column
    from autotune.replay.recording import RecordedAgain, RecordedTiming, Recording
    from autotune.routes.base import Route
    from autotune.tuner.target import Target

EVIDENCE = Path(__file__).resolve().parents[1] / "tests" / "data" / "h200-evidence.db.xz"
SHUFFLES = 20
TRAFFIC = ("uniform", "fleet", "one-server")

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Costs:
    """Recorded seconds.

    Attributes:
        column: of a route's checks in a column, by (column, route).
        cell: of a route's own launch in a cell, by (cell id, route).
        timing: by cell id.
    """

    column: Mapping[tuple[Column, str], float]
    cell: Mapping[tuple[str, str], float]
    timing: Mapping[str, float]

    @classmethod
    def of(cls, recording: Recording, timing: Mapping[str, float]) -> Costs:
        """A recording's proofs, and timings worked out elsewhere."""
        column: dict[tuple[Column, str], float] = defaultdict(float)
        cell: dict[tuple[str, str], float] = defaultdict(float)
        for check in recording.checks:
            if check.cell_id is None:
                column[check.column, check.route] += check.seconds
            else:
                cell[check.cell_id, check.route] += check.seconds
        return cls(column, cell, timing)

    def settle(self, cell: Cell, routes: Iterable[str], proven: set[tuple[Column, str]]) -> float:
        """Seconds that settling ``cell`` takes, with proofs of ``routes``; extends ``proven``."""
        seconds = self.timing[cell.id]
        for name in routes:
            seconds += self.cell.get((cell.id, name), 0.0)
            if (cell.column, name) not in proven:
                proven.add((cell.column, name))
                seconds += self.column.get((cell.column, name), 0.0)
        return seconds


def charged(
    queue: Sequence[Cell], taken: Mapping[str, float], proofs: Costs, routes: Sequence[str]
) -> dict[str, float]:
    """Timing of each cell as an exhaustive replay was charged: what its cells took, less their proofs."""
    proven: set[tuple[Column, str]] = set()
    return {cell.id: taken[cell.id] - proofs.settle(cell, routes, proven) for cell in queue}


def least_timing(
    timing: RecordedTiming,
    pair: tuple[str, str],
    test: SignTest,
    questions: Iterable[Question],
    again: Iterable[RecordedAgain] = (),
) -> float:
    """Seconds of timing ``pair`` (fallback, winner) alone until no objective needs another chunk.

    Args:
        questions: the objectives, each at its tau.
        again: recorded later processes of the cell.
    """
    rounds, pace = timing.rounds, RecordedPace(timing)
    asked, seen = list(questions), 0
    later = enumerate(each for process in again for each in process.rounds)
    safe = Verdict(Status.SAFE)
    evidence = Evidence(
        pair[0],
        safe,
        [Candidate(pair[1], safe)],
        again=[replace(each, index=i) for i, each in later],
    )
    seconds = pace.start(pair)
    while seen < len(rounds) and plan_next(replace(evidence, rounds=rounds[:seen]), test, questions=asked):
        until = pace.chunk_end(seen)
        seconds += sum(pace.seconds(i, pair) for i in range(seen, until))
        seen = until
    return seconds


def curve_of(
    cells: Sequence[Cell], gains: Mapping[str, float], costs: Costs, routes: Callable[[Cell], Iterable[str]]
) -> Curve:
    """(seconds, gain) after each cell, in the order given."""
    proven: set[tuple[Column, str]] = set()
    found, seconds, gain = [], 0.0, 0.0
    for cell in cells:
        seconds += costs.settle(cell, routes(cell), proven)
        gain += gains[cell.id]
        found.append((seconds, gain))
    return found


def oracle_order(
    cells: Sequence[Cell], gains: Mapping[str, float], costs: Costs, routes: Callable[[Cell], Iterable[str]]
) -> list[Cell]:
    """The densest prefix of any column first; cells without a gain not at all."""
    waiting: dict[Column, list[Cell]] = defaultdict(list)
    for cell in cells:
        if gains[cell.id] > 0.0:
            waiting[cell.column].append(cell)
    proven: set[tuple[Column, str]] = set()

    def best(column: Column) -> tuple[float, list[Cell]]:
        """The most gain per second of a prefix, densest cells first."""
        alone = {
            cell.id: costs.settle(cell, routes(cell), {(column, name) for name in routes(cell)})
            for cell in waiting[column]
        }
        order = sorted(waiting[column], key=lambda cell: -gains[cell.id] / alone[cell.id])
        seen, seconds, gain = set(proven), 0.0, 0.0
        found: tuple[float, list[Cell]] = (-1.0, [])
        for count, cell in enumerate(order, 1):
            seconds += costs.settle(cell, routes(cell), seen)
            gain += gains[cell.id]
            if gain / seconds > found[0]:
                found = (gain / seconds, order[:count])
        return found

    offers = {column: best(column) for column in waiting}
    order: list[Cell] = []
    while offers:
        column = max(offers, key=lambda each: offers[each][0])
        taken = offers[column][1]
        order += taken
        for cell in taken:
            waiting[column].remove(cell)
            proven |= {(column, name) for name in routes(cell)}
        if waiting[column]:
            offers[column] = best(column)
        else:
            del offers[column]
    return order


def time_to(curve: Curve, gain: float) -> float | None:
    """Seconds from which on the curve is never below ``gain`` again; None if it ends below."""
    found = None
    for seconds, reached in curve:
        if reached < gain:
            found = None  # a letter was taken back
        elif found is None:
            found = seconds
    return found


def area(curve: Curve, whole: float, end: float) -> float:
    """Mean share of the gain over the time to ``end``: 1 were it all there at once."""
    total, last, reached = 0.0, 0.0, 0.0
    for seconds, gain in curve:
        total += (min(seconds, end) - min(last, end)) * reached
        last, reached = seconds, gain
    return (total + max(0.0, end - last) * reached) / (whole * end)


def shapes(name: str, cells: Iterable[Cell]) -> list[dict[str, int]]:
    """The lines of a traffic file over the space's batches, q_lens and KV rows."""
    found = []
    for batch, q_len, kv in sorted({(c.column.batch_size, c.column.q_len, c.kv_high) for c in cells}):
        if name == "uniform":
            share = 1.0
        elif name == "fleet":
            share = exp(-((log2(kv) - 12.0) ** 2) / 8.0) / (batch * q_len)
        else:
            share = 0.25 if q_len == 4 and batch <= 8 and kv <= 16384 else 0.0
        if count := round(100_000 * share):
            found.append({"batch": batch, "q_len": q_len, "kv": kv, "count": count})
    return found


def weights(lines: Iterable[Mapping[str, int]], cells: Sequence[Cell]) -> dict[str, float]:
    """Calls of each cell as shares of all, as ``--traffic`` reads the lines."""
    found = weigh((ShapeCount.parse(json.dumps(line)) for line in lines), cells).by_cell
    total = sum(found.values())
    return {cell.id: found.get(cell.id, 0.0) / total for cell in cells}


def main() -> int:
    """Print the table, and draw it if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--evidence", type=Path, default=EVIDENCE)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--engine", default="sglang")
    parser.add_argument("--share", type=float, default=0.99)
    parser.add_argument("--traffic", action="append", choices=TRAFFIC, help="only this one (repeatable)")
    parser.add_argument("--traffic-dir", type=Path, help="keep the traffic files here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw gain over time (needs matplotlib)")
    options = parser.parse_args()
    recording = read_recording(options.evidence, lambda offers: offers[0][0])
    asked = ask(options.gpu, options.engine, None)
    there = replace(target(asked, recording.study.fingerprint.facts), seed=recording.study.seed)
    routes = recorded_routes(recording, all_routes(there.facts.device))
    whole = replay(recording, there, routes, recorded_only=True)
    answers = {each.item.cell.id: each for each in next(iter(whole.answers.values()))}
    queue = [each.item.cell for each in answers.values()]
    listed = [item.cell for item in asked.grid.cells if item.cell.id in answers]
    every = tuple(routes)
    proofs = Costs.of(recording, dict.fromkeys(answers, 0.0))
    costs = replace(proofs, timing=charged(queue, whole.costs, proofs, every))
    fallback = {cell.column: _fallback(there, routes, cell.column) for cell in queue}

    def winner(cell: Cell) -> tuple[str, ...]:
        route = answers[cell.id].decision.route
        return (fallback[cell.column], *(() if route is None else (route,)))

    study = recording.study
    test = SignTest(study.margin, study.multiplicity, ALPHA, unit=Unit(study.unit))
    objectives = Objectives(study.objectives, asked.grid.entries)
    least = dict(costs.timing)
    for cell in queue:
        if (route := answers[cell.id].decision.route) is not None:
            asks = [Question(each, whole.taus[name]) for name, each in objectives.of(cell.column).items()]
            least[cell.id] = least_timing(
                recording.timings[cell.id],
                (fallback[cell.column], route),
                test,
                asks,
                recording.again.get(cell.id, ()),
            )
    cheap = replace(costs, timing=least)
    end = curve_of(queue, dict.fromkeys(answers, 0.0), costs, lambda _: every)[-1][0]
    print(f"{len(queue)} recorded cells, {end:.0f} s of recorded time; engine {options.engine}")
    print(
        f"{'traffic':12} {'order':10} {f's to {options.share:.0%}':>10} {'s to 90%':>10} {'mean share':>11}",
        flush=True,
    )
    curves: dict[str, dict[str, list[Curve]]] = {}
    for traffic in options.traffic or TRAFFIC:
        lines = shapes(traffic, [item.cell for item in asked.grid.cells])
        if options.traffic_dir is not None:
            options.traffic_dir.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (options.traffic_dir / f"{traffic}.jsonl").write_text(text, "utf-8")
        weight = weights(lines, queue)
        gains = {name: weight[name] * gain_of(each.decision) for name, each in answers.items()}
        shuffled = []
        for seed in range(SHUFFLES):
            order = list(listed)
            random.Random(seed).shuffle(order)
            shuffled.append(curve_of(order, gains, costs, lambda _: every))
        found = replay(
            recording,
            there,
            routes,
            budget_s=2.0 * whole.seconds,
            adaptive=True,
            weights=weight,
            recorded_only=True,
        )
        curves[traffic] = {
            "adaptive": [list(found.curve)],
            "oracle": [curve_of(oracle_order(queue, gains, cheap, winner), gains, cheap, winner)],
            "cheapest": [curve_of(queue, gains, costs, lambda _: every)],
            "grid": [curve_of(listed, gains, costs, lambda _: every)],
            "random": shuffled,
        }
        _tell(traffic, curves[traffic], options.share, end)
    return 0 if options.plot is None else _plot(curves, options.plot)


def _tell(traffic: str, orders: Mapping[str, Sequence[Curve]], share: float, end: float) -> None:
    """Print one traffic's rows."""
    most = orders["cheapest"][0][-1][1]
    for name, each in orders.items():
        ends = [_mean([time_to(curve, part * most * (1 - 1e-12)) for curve in each]) for part in (share, 0.9)]
        mean = sum(area(curve, most, end) for curve in each) / len(each)
        print(f"{traffic:12} {name:10} {ends[0]:>10} {ends[1]:>10} {mean:11.3f}", flush=True)
    beaten = time_to(orders["adaptive"][0], share * most)
    bound = time_to(orders["oracle"][0], share * most)
    if beaten is not None and bound is not None and beaten < bound:
        print(f"{traffic}: adaptive reaches {share:.0%} before the oracle: compare no further")


def _mean(times: Sequence[float | None]) -> str:
    reached = [each for each in times if each is not None]
    return f"{sum(reached) / len(reached):.1f}" if len(reached) == len(times) else "never"


def _fallback(there: Target, routes: Mapping[str, Route], column: Column) -> str:
    from autotune.tuner.lineup import line_up

    found = line_up(column, routes, there.engine, there.arch, there.facts).fallback
    assert found is not None
    return found.name


# A line of a picture needs no more.
POINTS = 150


def _plot(curves: Mapping[str, Mapping[str, Sequence[Curve]]], path: Path) -> int:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        sys.stderr.write("--plot needs matplotlib: pip install matplotlib\n")
        return 1
    figure = Figure(figsize=(5 * len(curves), 4), layout="constrained")
    for place, (traffic, found) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(1, len(curves), place)
        most = found["cheapest"][0][-1][1]
        for name, each in found.items():
            for number, curve in enumerate(each):
                shown = [*curve[:: max(1, len(curve) // POINTS)], curve[-1]]
                axes.step(
                    [0.0, *(seconds for seconds, _ in shown)],
                    [0.0, *(gain / most for _, gain in shown)],
                    where="post",
                    color=f"C{list(found).index(name)}",
                    alpha=1.0 if len(each) == 1 else 0.15,
                    label=name if number == 0 else None,
                )
        axes.set(title=traffic, xlabel="recorded seconds", ylabel="share of the gain", ylim=(0.0, 1.02))
        axes.legend()
    figure.savefig(path, dpi=80)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
