"""What a table is worth: its routed choice against fixed policies, on the times of the study it came from.

    python benchmarks/policies.py --db SOURCE --engine sglang [--gpu h200] [--svg FILE]

``SOURCE`` is a database (``.db``, ``.db.xz``, a URL), read through a copy. Per model and dtype: geometric
mean over cells of time(policy) / time(routed choice), under ``graph`` (time of ``run``) and under ``step``
(one preparation and ``--layers`` calls, nothing hidden), and the cell where the policy does worst. A policy
that is not deployable in the engine is left out; a cell where one of the routes was not timed is left out of
that policy's mean, and the count is shown. Needs no GPU. Every time is a median of the stored rounds.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from math import exp, log
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from autotune.bench.objective import graph, step
from benchmarks.recorded import RecordedError, ended, judged, opened
from benchmarks.svg import Bar, bars

if TYPE_CHECKING:
    from autotune.bench.objective import Objective
    from autotune.tuner.standing import Evidence

DECODE = ("xqa-decode", "trtllm-gen-decode", "torch-splitkv")
FA2 = "fa2"
COLOURS = {"graph": "#4878a8", "step": "#b8860b"}


def time_of(evidence: Evidence, route: str | None, objective: Objective) -> float | None:
    """Median time of ``route`` in microseconds; None if it was not timed in the cell."""
    times = [objective(r, route) for r in evidence.rounds if route is not None and route in r.run_us]
    return median(times) if times else None


def geometric(values: list[float]) -> float:
    """Geometric mean."""
    return exp(sum(map(log, values)) / len(values))


def picture(engine: str, ratios: dict[tuple[str, str], dict[tuple[str, str], list[float]]]) -> str:
    """The means as bars."""
    drawn = [
        Bar(f"{model} {dtypes}, {policy} ({name})", geometric(values), colour=COLOURS[name])
        for (model, dtypes), each in sorted(ratios.items())
        for (name, policy), values in sorted(each.items(), key=lambda item: (item[0][1], item[0][0]))
    ]
    return bars(f"{engine}: time of a policy / time of the table's choice, geometric means", drawn, mark=1.0)


def main(arguments: list[str]) -> int:
    """Print the table. Exit 1 if the source cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--db", required=True, metavar="SOURCE")
    parser.add_argument("--gpu", help="must be the study's, if it is given")
    parser.add_argument("--space", type=Path)
    parser.add_argument("--engine", default="generic")
    parser.add_argument("--routes", help="must be among the study's, if it is given")
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the means")
    options = parser.parse_args(arguments)

    def run() -> None:
        ratios: dict[tuple[str, str], dict[tuple[str, str], list[tuple[float, str]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        errors: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        cells: dict[tuple[str, str], int] = defaultdict(int)
        with opened(options.db) as database:
            study = judged(database, options.db, options.engine, space=options.space)
            judge = study.judge
            if options.gpu not in (None, study.study.space_name):
                raise RecordedError(
                    f"{options.db}: is a study of {study.study.space_name}, not {options.gpu}"
                )
            if missing := set((options.routes or "").split(",")) - {""} - set(judge.routes):
                raise RecordedError(f"{options.db}: has no proof of {', '.join(sorted(missing))}")
            deployable = set(judge.target.engine.deployable(judge.target.arch))
            for item in study.cells:
                evidence = item.evidence
                if not evidence.rounds:
                    continue
                dtypes = item.cell.column.dtypes
                key = (item.models[0], f"{dtypes.q}/{dtypes.kv}")
                cells[key] += 1
                policies = {"always fallback": evidence.fallback, "stock": evidence.stock}
                policies |= {f"always {name}": name for name in (*DECODE, FA2) if name in deployable}
                for objective_name, objective in (("graph", graph), ("step", step(options.layers))):
                    mine = time_of(evidence, item.choice, objective)
                    for policy, route in policies.items():
                        other = time_of(evidence, route, objective)
                        if mine and other:
                            ratios[key][objective_name, policy].append((other / mine, str(item.cell)))
                decision = item.outcome.decision
                if decision.route is not None:
                    verdict = judge.verdict(judge.routes[decision.route], item.cell)
                    errors[key].append(
                        (verdict.worst_error or 0.0, evidence.fallback_verdict.worst_error or 0.0)
                    )
        print(f"engine {options.engine}: time of each policy / time of the table's choice, geometric means")
        for key in sorted(ratios):
            print(f"{key[0]}  {key[1]}  ({cells[key]} cells timed)")
            for (objective_name, policy), values in sorted(ratios[key].items()):
                mean = geometric([value for value, _ in values])
                worst, where = max(values)
                count = f"({len(values)} cells, worst {worst:.2f}: {where})"
                print(f"  {objective_name:6} {policy:24} {mean:6.3f}   {count}")
            if errors[key]:
                routed = max(error for error, _ in errors[key])
                fallback = max(error for _, error in errors[key])
                print(f"  worst error of routed choices {routed:.4f}, of the fallback there {fallback:.4f}")
        if options.svg is not None:
            plain = {
                key: {name: [value for value, _ in values] for name, values in each.items()}
                for key, each in ratios.items()
            }
            options.svg.write_text(picture(options.engine, plain), encoding="utf-8")

    return ended(run, "policies")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
