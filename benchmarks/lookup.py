"""What one routing decision costs: ``python benchmarks/lookup.py [--json] [--flashinfer DIR] [--full]``.

Prints nanoseconds a call, the least of many short repeats taken in turn, so that a busy moment hits all rows:

* ``floor``: a function that does one hit in a dictionary keyed by a tuple, the least any router can do;
* ``bound``: ``Bound.route`` on a captured size with and without a KV length, where every row
  names another kernel than the one before, inside an interval, and a miss;
* ``nearest key``: the nearest of a configuration's keys, as the fused-MoE kernels of serving engines choose;
* ``FlashInfer``: a hit in ``AutoTuner.search_cache`` of the package in DIR; one tensor, one runner, no GPU;
* ``unbound``: ``Router.bind`` followed by ``route``, which no caller should do per step;
* ``poll``: ``Router.poll`` when it is too early to look at the file, and one that looks;

then the time to load tables, the memory that a million look-ups leave behind, and with ``--full`` the answers
of 8 threads during 1,000 reloads. Times are CPU time of the process: on a shared machine a wall clock
measures the neighbours. The tables are synthetic (random letters over the real builder); only their size
matters here, and they are never written to ``tuned_configs/``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import timeit
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.domain.cell import Cell, Column
from autotune.domain.decision import Decision, Reason
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.domain.verdict import Status, Verdict
from autotune.router import Bound, Router
from autotune.table.build import DecidedCell, build_table
from autotune.table.dump import dump_table, write_table
from autotune.table.load import load_table
from autotune.table.model import Generated, Policy, RoutingTable

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
SHIPPED = Path(__file__).parents[1] / "tuned_configs"


def cells(shapes: Sequence[Shape] = (SHAPE,), seed: int = 0) -> list[DecidedCell]:
    """Every q_len, size and row, one interval sampled, three letters in four naming a route."""
    chance = random.Random(seed)
    verdict = Verdict(Status.SAFE, launches=100, checks=16, worst_error=0.004)
    slower = Decision(None, Reason.NOT_FASTER)
    found = []
    for shape in shapes:
        for q_len in Q_LENS:
            columns = [(size, None) for size in SIZES] + [(200, (128, 256))]
            for size, interval in columns:
                column = Column(shape, DTYPES, q_len, size, ENDS[-1], interval)
                low = q_len
                for end in ENDS:
                    # Ratios as various as measured ones: equal ones would be parsed once and remembered.
                    ratio = 1.0 + chance.randrange(300, 9999) / 1e4
                    faster = Decision("xqa-decode", Reason.PROVEN_FASTER, speedup_low=ratio, vs_stock=ratio)
                    decision = slower if chance.random() < 0.25 and size < 128 else faster
                    cell = Cell(column, low, end)
                    found.append(
                        DecidedCell(cell, decision, (), "fa2", verdict if decision.route else None, 0.003)
                    )
                    low = end + 1
    return found


def table_of(decided: Sequence[DecidedCell]) -> RoutingTable:
    """A table of these cells."""
    return build_table(
        decided,
        facts=FACTS,
        generated=Generated("benchmarks/lookup.py", "2026-01-01T00:00:00Z", "synthetic"),
        policy=Policy("generic", "xqa-decode", "graph", 0.02, None, 0.05),
        families={"xqa-decode": "decode", "fa2": "context"},
    )


def nanoseconds(calls: Mapping[str, tuple[str, Any]], repeats: int = 400) -> dict[str, float]:
    """The least CPU time of each call, the timing loop's own cost included.

    Args:
        calls: by name, a statement that calls ``f`` and what ``f`` is. Statements, not functions: a wrapper
            would add the same to every row and flatter each ratio.
    """
    timers = {
        name: timeit.Timer(statement, timer=time.process_time, globals={"f": function})
        for name, (statement, function) in calls.items()
    }
    number = {name: max(1, int(0.0005 / max(timer.timeit(3) / 3, 1e-9))) for name, timer in timers.items()}
    best = dict.fromkeys(timers, float("inf"))
    for _ in range(repeats):
        for name, timer in timers.items():
            best[name] = min(best[name], timer.timeit(number[name]) / number[name] * 1e9)
    return best


def nearest_key(configs: Mapping[int, str]) -> Callable[[int, int, int], str]:
    """What the fused-MoE kernels of SGLang and vLLM do with a configuration file's batch sizes."""

    def find(batch_size: int, q_len: int, max_kv_len: int) -> str:
        return configs[min(configs.keys(), key=lambda known: abs(known - batch_size))]

    return find


def flashinfer_hit(folder: Path | None) -> tuple[Callable[[], Any] | None, str]:
    """A call of ``AutoTuner.search_cache`` that hits, or None and what is missing."""
    if folder is None:
        return None, "not measured: --flashinfer DIR names the folder that holds the package"
    sys.path.insert(0, str(folder))
    try:
        import flashinfer
        import torch
        from flashinfer.autotuner import AutoTuner, DynamicTensorSpec, TunableRunner, TuningConfig

        class Runner(TunableRunner):  # type: ignore[misc]
            def get_valid_tactics(self, inputs: Any, profile: Any) -> list[int]:
                return [0]

            def forward(self, inputs: Any, tactic: int = -1, **kwargs: Any) -> Any:
                return inputs[0]

        tuner, runner = AutoTuner.get(), Runner()
        buckets = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        spec = DynamicTensorSpec(
            input_idx=(0,),
            dim_idx=(0,),
            gen_tuning_buckets=buckets,
            map_to_tuning_buckets=lambda size: max(known for known in buckets if known <= size),
        )
        config = TuningConfig(dynamic_tensor_specs=(spec,))
        shapes = (torch.Size((128, 8, 256)),)
        key = AutoTuner._get_cache_key("benchmark", runner, shapes, config, ())
        tuner.profiling_cache[key] = (0, None)

        def hit() -> Any:
            return tuner.search_cache("benchmark", [runner], shapes, config)

        if not hit()[0]:
            return None, "not measured: its cache did not take the entry"
        return hit, f"FlashInfer {flashinfer.__version__}"
    except Exception as error:
        return None, f"not measured: {folder}: {' '.join(str(error).split())[:200]}"
    finally:
        sys.path.remove(str(folder))


def loading(path: Path) -> float:
    """Milliseconds of CPU time to read, check and index a table: the least of 15."""
    facts = load_table(path).facts
    best = float("inf")
    for _ in range(15):
        start = time.process_time()
        router = Router.load(path, facts=facts)
        best = min(best, time.process_time() - start)
        assert router.status.active, router.status.reason
    return best * 1e3


def left_behind(bound: Bound, calls: int = 1_000_000) -> tuple[int, int]:
    """Bytes that ``calls`` look-ups leave allocated, and the most that were at any one time."""
    route = bound.route
    for _ in range(1000):
        route(128, 4, 8192)
    steps, spare = range(calls // 4), range(10)
    tracemalloc.start()
    try:
        for _ in spare:
            route(128, 4, 8192)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in steps:
            route(128, 4, 8192)
            route(128, 4)
            route(200, 4, 8192)
            route(128, 8, 200)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before, peak - before


def reloads(folder: Path, times: int, threads: int = 8) -> dict[str, int]:
    """Look-ups by ``threads`` threads while the table's file is replaced ``times`` times.

    The two tables have rows that end elsewhere and letters that answer the opposite beside each end. With
    rows from one table and letters from the other, a look-up would answer what neither says.
    """
    path = folder / "reloaded.yaml"
    tables = [
        table_of(_striped(True, (512, 2048, 4096, ENDS[-1]))),
        table_of(_striped(False, (1024, 1500, 8192, ENDS[-1]))),
    ]
    images = [dump_table(table) for table in tables]
    queries: list[tuple[int, int, int | None]] = [
        (size, 4, kv) for size in SIZES for kv in (4, 600, 1400, 2500, 5000, 100_000)
    ]
    queries += [(size, 4, None) for size in SIZES]
    valid = []
    for image in images:
        path.write_bytes(image)
        bound = Router.load(path, facts=FACTS).bind(SHAPE, DTYPES, max_context=ENDS[-1])
        valid.append([bound.route(*query) for query in queries])
    allowed = [set(pair) for pair in zip(*valid, strict=True)]
    router = Router.load(path, facts=FACTS)
    bound = router.bind(SHAPE, DTYPES, max_context=ENDS[-1])
    done, wrong, looked = threading.Event(), [0] * threads, [0] * threads

    def look(index: int) -> None:
        while not done.is_set():
            for query, answers in zip(queries, allowed, strict=True):
                if bound.route(*query) not in answers:
                    wrong[index] += 1
            looked[index] += len(queries)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # from 5 ms: fifty times as many chances to be caught in the middle
    running = [threading.Thread(target=look, args=(index,)) for index in range(threads)]
    for thread in running:
        thread.start()
    taken_up = 0
    fresh = folder / "fresh.yaml"
    for step in range(times):
        fresh.write_bytes(images[step % 2])
        fresh.replace(path)
        taken_up += router.poll(min_interval_s=0.0)
    done.set()
    for thread in running:
        thread.join()
    sys.setswitchinterval(interval)
    return {"reloads": taken_up, "look-ups": sum(looked), "wrong": sum(wrong)}


def _striped(even: bool, ends: Sequence[int]) -> list[DecidedCell]:
    verdict = Verdict(Status.SAFE, launches=100, checks=16, worst_error=0.004)
    found = []
    for size in SIZES:
        column = Column(SHAPE, DTYPES, 4, size, ENDS[-1])
        low = 4
        for index, end in enumerate(ends):
            named = (index % 2 == 0) is even
            decision = Decision("xqa-decode", Reason.PROVEN_FASTER, speedup_low=1.1) if named else None
            found.append(
                DecidedCell(
                    Cell(column, low, end),
                    decision or Decision(None, Reason.NOT_FASTER),
                    (),
                    "fa2",
                    verdict if named else None,
                    0.003,
                )
            )
            low = end + 1
    return found


def bound_of(path: Path, table: RoutingTable) -> Bound:
    """The table's only binding."""
    write_table(table, path)
    router = Router.load(path, facts=FACTS)
    assert router.status.active, router.status.reason
    return router.bind(SHAPE, DTYPES, max_context=ENDS[-1])


def measure(folder: Path, flashinfer: Path | None, full: bool) -> dict[str, Any]:
    """All figures."""
    small, large = folder / "small.yaml", folder / "large.yaml"
    write_table(table_of(cells()), small)
    many = cells([Shape(heads, 1, 256, 64) for heads in range(1, 29)])
    write_table(table_of(many), large)
    # First: with FlashInfer and torch imported, garbage collections on the way look at their objects too.
    loads = {f"{len(many)} cells": loading(large)}
    loads |= {path.name: loading(path) for path in sorted(SHIPPED.glob("*.yaml"))}
    router = Router.load(small, facts=FACTS)
    assert router.status.active, router.status.reason
    bound = router.bind(SHAPE, DTYPES, max_context=ENDS[-1])
    flat = {(size, q_len, end): "xqa-decode" for q_len in Q_LENS for size in SIZES for end in ENDS}

    def floor(batch_size: int, q_len: int, max_kv_len: int) -> str:
        return flat[batch_size, q_len, max_kv_len]

    route = bound.route
    assert (route(128, 4, 8192), route(200, 4, 8192), route(7, 4, 8192)) == ("xqa-decode",) * 2 + ("fa2",)
    alternating = bound_of(folder / "striped.yaml", table_of(_striped(True, ENDS)))
    hit, version = flashinfer_hit(flashinfer)
    calls: dict[str, tuple[str, Any]] = {
        "floor": ("f(128, 4, 8192)", floor),
        "bound, captured size and KV length": ("f(128, 4, 8192)", route),
        "bound, captured size, no KV length": ("f(128, 4)", route),
        "bound, another kernel in each row": ("f(128, 4, 8192)", alternating.route),
        "bound, inside an interval": ("f(200, 4, 8192)", route),
        "bound, use_decode": ("f(128, 4, 8192)", bound.use_decode),
        "bound, a miss": ("f(7, 4, 8192)", route),
        "nearest key, fused-MoE style": ("f(100, 4, 8192)", nearest_key(dict.fromkeys(SIZES, "a"))),
        "poll, too early to look": ("f(3600.0)", router.poll),
        "poll, looks at the file": ("f(0.0)", router.poll),
    }
    if hit is not None:
        calls["FlashInfer AutoTuner.search_cache"] = ("f()", hit)
    found = nanoseconds(calls)

    def unbound() -> str:
        return router.bind(SHAPE, DTYPES, max_context=ENDS[-1]).route(128, 4, 8192)

    found |= nanoseconds({"unbound": ("f()", unbound)}, 10)
    left, most = left_behind(bound)
    figures: dict[str, Any] = {
        "python": sys.version.split()[0],
        "nanoseconds": {name: round(value, 1) for name, value in found.items()},
        "flashinfer": version,
        "load_ms": {name: round(value, 1) for name, value in loads.items()},
        "bytes left by 1,000,000 look-ups": left,
        "most bytes during them": most,
    }
    if full:
        figures["8 threads during reloads"] = reloads(folder, 1000)
    return figures


def text_of(figures: Mapping[str, Any]) -> str:
    """One line a figure."""
    nanos = figures["nanoseconds"]
    floor = nanos["floor"]
    lines = [f"Python {figures['python']}"]
    lines += [f"{name:<36}{value:>12,.0f} ns{value / floor:>10.2f} x floor" for name, value in nanos.items()]
    searched = nanos.get("FlashInfer AutoTuner.search_cache")
    slowest = max(value for name, value in nanos.items() if name.startswith("bound") and "miss" not in name)
    if searched is None:
        lines.append(f"{'FlashInfer AutoTuner.search_cache':<36}{figures['flashinfer']}")
    else:
        lines.append(f"{figures['flashinfer']}: {searched / slowest:.1f} x the slowest bound hit")
    lines += [f"{'load, ' + name:<36}{value:>12,.1f} ms" for name, value in figures["load_ms"].items()]
    for name in ("bytes left by 1,000,000 look-ups", "most bytes during them"):
        lines.append(f"{name:<36}{figures[name]:>12,}")
    for name, value in figures.get("8 threads during reloads", {}).items():
        lines.append(f"{'8 threads, ' + name:<36}{value:>12,}")
    return "\n".join(lines)


def main() -> int:
    """Print one line a figure, or one JSON object; exit 1 if a look-up during a reload was wrong."""
    parser = argparse.ArgumentParser(description="Cost of one routing decision.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--flashinfer", type=Path, metavar="DIR", help="folder that holds the package")
    parser.add_argument("--full", action="store_true", help="also 8 threads during 1,000 reloads")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), given.flashinfer, given.full)
    sys.stdout.write((json.dumps(figures) if given.json else text_of(figures)) + "\n")
    return 1 if figures.get("8 threads during reloads", {}).get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
