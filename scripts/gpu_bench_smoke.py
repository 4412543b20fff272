"""Time a handful of cells on this GPU, in this process: what a cell costs, and where its time goes.

    python scripts/gpu_bench_smoke.py [--seconds 50] [--routes xqa-decode,fa2] [--out FILE.json]

Without --routes: every FlashInfer route that takes the cell and opens without a compiler, and the planted
clean Triton kernel, so that the clock can be tried where FlashInfer is not installed. Ends with a table of
the cells, the share of each phase, and cells per minute; proofs are not in it.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# a module that was not prebuilt would be compiled for minutes
os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")

if TYPE_CHECKING:
    from autotune.bench.record import Round
    from autotune.domain.cell import Cell
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Route

CLEAN = "planted-cuda-clean"
MAX_CONTEXT = 131_072
# (query heads, KV heads, head_dim, profile, q_len, batch, kv_high): small and large, launch-bound and not
CELLS = (
    (8, 1, 128, "bf16", 4, 1, 1024),
    (8, 1, 128, "bf16", 4, 1, 8192),
    (8, 1, 128, "bf16", 4, 16, 8192),
    (8, 1, 128, "bf16", 4, 64, 1024),
    (8, 1, 128, "fp8", 4, 64, 8192),
    (8, 1, 256, "fp8", 4, 16, 16384),
    (8, 1, 256, "bf16", 4, 64, 4096),
    (32, 2, 256, "fp8", 4, 64, 16384),
    (8, 1, 128, "fp8", 4, 256, 65536),
    (8, 1, 128, "bf16", 1, 256, 1024),
)


def cells() -> list[Cell]:
    """The cells above in SGLang's layout."""
    from autotune.domain.cell import Cell, Column
    from autotune.domain.dtypes import PROFILES
    from autotune.domain.shape import Shape

    made = []
    for heads, kv_heads, dim, profile, q_len, batch, kv in CELLS:
        column = Column(Shape(heads, kv_heads, dim, 64), PROFILES[profile], q_len, batch, MAX_CONTEXT)
        made.append(Cell(column, max(q_len, kv // 2 + 1), kv))
    return made


class Phases:
    """Wall time per phase; waits for the device at each change, so that a phase pays for what it queued."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._name, self._start = "", time.perf_counter()

    def __call__(self, name: str) -> None:
        import torch

        torch.cuda.synchronize()
        now = time.perf_counter()
        if self._name:
            self.seconds[self._name] += now - self._start
        self._name, self._start = name, now


def run_cell(cell: Cell, names: Sequence[str], facts: Facts, rounds: int) -> tuple[list[Round], Phases]:
    """Time one cell; a route that fails while it is opened is left out with a line."""
    from autotune.arena.plain import PlainArena
    from autotune.bench.record import CHUNK, MIN_GROUP_MS, RoundSettings
    from autotune.bench.rounds import time_cell
    from autotune.worker.jobs import child_route

    routes: list[Route] = [child_route(name) for name in names]
    routes = [route for route in routes if not route.supports(cell.column, facts)]
    while routes:
        seen: list[Round] = []
        running = [""]
        phases = Phases()
        try:
            time_cell(
                routes,
                cell,
                facts,
                seed=1,
                device="cuda",
                make_arena=lambda placement: PlainArena("cuda", placement),
                settings=RoundSettings(
                    min_group_ms=MIN_GROUP_MS["cuda"], chunk=CHUNK["cuda"], max_rounds=rounds
                ),
                first_round=0,
                go_on=lambda chunk, seen=seen: seen.extend(chunk) or True,  # type: ignore[misc]
                launching=lambda name, running=running: running.__setitem__(0, name or running[0]),  # type: ignore[misc]
                phase=phases,
            )
        except Exception as error:
            text = " ".join(str(error).split())[:160]
            if "CUDA error" in text or not running[0]:
                raise
            print(f"{cell}: {running[0]} left out: {type(error).__name__}: {text}", flush=True)
            routes = [route for route in routes if route.name != running[0]]
            continue
        phases("")
        return seen, phases
    return [], Phases()


def row(cell: Cell, rounds: list[Round], seconds: float) -> dict[str, Any]:
    """What a cell's rounds say."""
    from autotune.bench.noise import log_spread
    from autotune.bench.objective import paired_ratios

    names = sorted(rounds[0].run_us)
    best = min(names, key=lambda name: statistics.median(r.run_us[name] for r in rounds))
    return {
        "cell": str(cell),
        "seconds": round(seconds, 3),
        "dropped": sum(1 for r in rounds if r.dropped),
        "routes": {
            name: {
                "run_us": round(statistics.median(r.run_us[name] for r in rounds), 2),
                "host_us": round(statistics.median(r.host_us[name] for r in rounds), 1),
                "prepare_us": round(statistics.median(r.prepare_us[name] for r in rounds), 1),
                "calls": rounds[-1].calls[name],
                "spread": round(log_spread(paired_ratios(rounds, best, name)), 4) if name != best else 0.0,
            }
            for name in names
        },
        "conditions": next((r.conditions for r in reversed(rounds) if r.conditions), None),
    }


def main() -> int:
    """Run, print, and write ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50.0, help="start no cell after this (default 50)")
    parser.add_argument("--rounds", type=int, default=24, help="rounds a cell past the start-up (default 24)")
    parser.add_argument("--routes", default="", help="comma-separated names")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        print("no CUDA GPU here", file=sys.stderr)
        return 3
    from autotune.hardware.collect import collect
    from autotune.routes import registry

    began = time.perf_counter()
    facts = collect("cuda")
    names = options.routes.split(",") if options.routes else [*registry.routes("cuda"), CLEAN]
    # The first cell's start (driver context, library import, module loading) is a process's, not a cell's.
    todo = [cells()[0], *cells()]
    rows: list[dict[str, Any]] = []
    shares: dict[str, float] = defaultdict(float)
    for number, cell in enumerate(todo):
        start = time.perf_counter()
        if start - began > options.seconds:
            print(f"out of time before {cell}", flush=True)
            break
        seen, phases = run_cell(cell, names, facts, options.rounds)
        seconds = time.perf_counter() - start
        if not seen:
            print(f"{cell}: no route takes it here")
            continue
        if number == 0:
            print(f"first cell, with everything that a process does once: {seconds:.2f} s", flush=True)
            continue
        rows.append(row(cell, seen, seconds))
        for name, spent in phases.seconds.items():
            shares[name] += spent
        print(f"{seconds:6.2f} s  {cell}")
        for name, got in rows[-1]["routes"].items():
            print(
                f"          {name:28} run {got['run_us']:9.2f} us  host {got['host_us']:6.1f}  "
                f"prepare {got['prepare_us']:7.1f}  calls {got['calls']:3}  spread {got['spread']:.4f}",
                flush=True,
            )
    total = sum(shares.values())
    if not rows:
        return 1
    print("where the time went:")
    for name, spent in sorted(shares.items(), key=lambda item: -item[1]):
        print(f"  {spent:7.2f} s  {100 * spent / total:5.1f} %  {name}")
    wall = sum(r["seconds"] for r in rows)
    print(
        f"{len(rows)} cells in {wall:.1f} s: {60 * len(rows) / wall:.0f} cells a minute, proofs not counted"
    )
    if options.out:
        options.out.write_text(json.dumps({"rows": rows, "phases": shares}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
