"""What a table is worth: its routed choice against fixed policies, on the times of the study it came from.

    python benchmarks/policies.py --db sqlite:///h200.db --gpu h200 --engine sglang [--routes a,b]

Per model and dtype: geometric mean over cells of time(policy) / time(routed choice), under ``graph`` (time of
``run``) and under ``step`` (one preparation and ``--layers`` calls, nothing hidden). A policy that is not
deployable in the engine is left out; a cell where one of the routes was not timed is left out of that
policy's mean, and the count is shown. Needs no GPU. Every time is a median of the stored rounds.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
from collections import defaultdict
from math import exp, log
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from autotune.bench.objective import graph, step

if TYPE_CHECKING:
    from autotune.bench.objective import Objective
    from autotune.tuner.decide import Evidence

DECODE = ("xqa-decode", "trtllm-gen-decode", "torch-splitkv")
FA2 = "fa2"


def time_of(evidence: Evidence, route: str | None, objective: Objective) -> float | None:
    """Median time of ``route`` in microseconds; None if it was not timed in the cell."""
    times = [objective(r, route) for r in evidence.rounds if route is not None and route in r.run_us]
    return median(times) if times else None


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--db", required=True)
    parser.add_argument("--gpu")
    parser.add_argument("--space", type=Path)
    parser.add_argument("--engine", default="generic")
    parser.add_argument("--routes")
    parser.add_argument("--layers", type=int, default=15)
    options = parser.parse_args()

    from autotune.cli.context import ask
    from autotune.cli.export import _stored
    from autotune.store.database import open_database
    from autotune.tuner.run import open_run

    asked = ask(options.gpu, options.engine, options.space)
    ratios: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    errors: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    cells: dict[tuple[str, str], int] = defaultdict(int)
    with open_database(options.db) as database:
        target, routes = _stored(database, asked, None, options.routes)
        with open_run(database, target, routes, tuning=False) as run:
            deployable = set(target.engine.deployable(target.arch))
            for item in run.cells:
                evidence = run.judge.evidence(item.cell)
                if not evidence.rounds:
                    continue
                decision = run.judge.outcome(item.cell, evidence).decision
                chosen = decision.route or evidence.fallback
                dtypes = item.cell.column.dtypes
                key = (item.models[0], f"{dtypes.q}/{dtypes.kv}")
                cells[key] += 1
                policies = {"always fallback": evidence.fallback, "stock": evidence.stock}
                for name in DECODE:
                    if name in deployable:
                        policies[f"always {name}"] = name
                if FA2 in deployable:
                    policies["always fa2"] = FA2
                for objective_name, objective in (("graph", graph), ("step", step(options.layers))):
                    mine = time_of(evidence, chosen, objective)
                    for policy, route in policies.items():
                        other = time_of(evidence, route, objective)
                        if mine and other:
                            ratios[key][objective_name, policy].append(other / mine)
                if decision.route is not None:
                    verdict = run.judge.verdict(routes[decision.route], item.cell)
                    errors[key].append(
                        (verdict.worst_error or 0.0, evidence.fallback_verdict.worst_error or 0.0)
                    )
    print(f"engine {options.engine}: time of each policy / time of the table's choice, geometric means")
    for key in sorted(ratios):
        print(f"{key[0]}  {key[1]}  ({cells[key]} cells timed)")
        for (objective_name, policy), values in sorted(ratios[key].items()):
            mean = exp(sum(map(log, values)) / len(values))
            count = f"({len(values)} cells, worst {max(values):.2f})"
            print(f"  {objective_name:6} {policy:24} {mean:6.3f}   {count}")
        if errors[key]:
            routed = max(error for error, _ in errors[key])
            fallback = max(error for _, error in errors[key])
            print(f"  worst error of routed choices {routed:.4f}, of the fallback there {fallback:.4f}")


if __name__ == "__main__":
    main()
