"""What one routing decision costs: ``python benchmarks/lookup.py [--json]``.

Prints nanoseconds a call, the least of several repeats, for

* ``floor``: a function that does one hit in a dictionary keyed by a tuple, the least any router can do;
* ``bound``: ``Bound.route`` on a captured size, with and without a KV length, inside an interval, and a miss;
* ``unbound``: ``Router.bind`` followed by ``route``, which no caller should do per step.

and the time to load the table. The table is synthetic (random letters over the real builder); only its
size matters here, and it is never written to ``tuned_configs/``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

from autotune.domain.cell import Cell, Column
from autotune.domain.decision import Decision, Reason
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.domain.verdict import Status, Verdict
from autotune.router import Router
from autotune.table.build import DecidedCell, build_table
from autotune.table.dump import write_table
from autotune.table.model import Generated, Policy

SHAPE = Shape(8, 1, 256, 64)
DTYPES = PROFILES["fp8"]
FACTS = Facts(
    "cpu",
    {"name": "synthetic", "cores": 1, "threads": 1, "isa": "none"},
    {"torch": "0", "torch_commit": "0"},
)
Q_LENS = (1, 2, 4, 8)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ENDS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def cells() -> list[DecidedCell]:
    """Every q_len, size and row, one interval sampled, three letters in four naming a route."""
    chance = random.Random(0)
    verdict = Verdict(Status.SAFE, launches=100, checks=16, worst_error=0.004)
    slower = Decision(None, Reason.NOT_FASTER)
    faster = Decision("xqa-decode", Reason.PROVEN_FASTER, speedup_low=1.1)
    found = []
    for q_len in Q_LENS:
        columns = [(size, None) for size in SIZES] + [(200, (128, 256))]
        for size, interval in columns:
            column = Column(SHAPE, DTYPES, q_len, size, ENDS[-1], interval)
            low = q_len
            for end in ENDS:
                decision = slower if chance.random() < 0.25 and size < 128 else faster
                cell = Cell(column, low, end)
                found.append(
                    DecidedCell(cell, decision, (), "fa2", verdict if decision.route else None, 0.003)
                )
                low = end + 1
    return found


def nanoseconds(call: Callable[[], object], repeats: int = 7) -> float:
    """The least time a call took, its own loop's cost included."""
    timer = timeit.Timer(call)
    number, _ = timer.autorange()
    return min(timer.repeat(repeats, max(1, number // 4))) / max(1, number // 4) * 1e9


def measure(path: Path) -> dict[str, float]:
    """All figures for the table at ``path``."""
    router = Router.load(path, facts=FACTS)
    assert router.status.active, router.status.reason
    bound = router.bind(SHAPE, DTYPES, max_context=ENDS[-1])
    route = bound.route
    flat = {(q_len, size, end): "xqa-decode" for q_len in Q_LENS for size in SIZES for end in ENDS}

    def floor(size: int, q_len: int, kv: int) -> str:
        return flat.get((q_len, size, kv), "fa2")

    assert (route(128, 4, 8192), route(200, 4, 8192), route(7, 4, 8192)) == ("xqa-decode",) * 2 + ("fa2",)
    return {
        "floor": nanoseconds(lambda: floor(128, 4, 8192)),
        "bound, captured size and KV length": nanoseconds(lambda: route(128, 4, 8192)),
        "bound, captured size, no KV length": nanoseconds(lambda: route(128, 4)),
        "bound, inside an interval": nanoseconds(lambda: route(200, 4, 8192)),
        "bound, a miss": nanoseconds(lambda: route(7, 4, 8192)),
        "unbound": nanoseconds(
            lambda: router.bind(SHAPE, DTYPES, max_context=ENDS[-1]).route(128, 4, 8192), 3
        ),
        "load": nanoseconds(lambda: Router.load(path, facts=FACTS), 3),
    }


def main() -> int:
    """Print one line a figure, or one JSON object."""
    parser = argparse.ArgumentParser(description="Cost of one routing decision, in nanoseconds.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    decided = cells()
    table = build_table(
        decided,
        facts=FACTS,
        generated=Generated("benchmarks/lookup.py", "2026-01-01T00:00:00Z", "synthetic"),
        policy=Policy("generic", None, "graph", 0.02, 0.0, 0.05),
        families={"xqa-decode": "decode", "fa2": "context"},
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "synthetic.yaml"
        write_table(table, path)
        figures = measure(path)
    if as_json:
        text = json.dumps({"cells": len(decided), "nanoseconds": {k: round(v) for k, v in figures.items()}})
    else:
        lines = [f"{name:<36}{value:>12,.0f} ns" for name, value in figures.items()]
        text = "\n".join([f"{len(decided)} cells, Python {sys.version.split()[0]}", *lines])
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
