"""What the contract of a call costs a serving process: ``python benchmarks/contract.py [--json]``.

Per route, microseconds of one static check (``Contract.broken``), the least of several repeats:

* ``again``: a call that looks like the last right one of its batch size, which is what a layer's calls do;
* ``same lens``: with the KV lengths of 16 requests on the host, in a step's second layer and later;
* ``new lens``: in its first layer;
* ``first``: a call that goes through every rule (``check_step`` at level ``static``).

``a function call`` is the cost of calling an empty function in the same run: machines differ, and so does
one machine from one minute to the next. The operands are tensors on the CPU: a check reads their attributes,
which live on the host wherever the data is.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import timeit
from collections.abc import Callable

import torch

from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.routes.base import Capacity, Step
from autotune.routes.contract import KERNELS, Contract, Level, check_step

NAMES = ("again", "same lens", "new lens", "first")
BATCH, Q_LEN, PAGES, CONTEXT = 16, 4, 64, 4096
# Qwen3.5-397B at attn_tp 4; K and V are the halves of one pool, as in SGLang.
COLUMN = Column(Shape(8, 1, 256, 64), PROFILES["bf16"], Q_LEN, BATCH, CONTEXT)


def operands() -> tuple[Capacity, Step, torch.Tensor]:
    """One right call; nothing of it is ever computed."""
    shape, width = COLUMN.shape, COLUMN.table_width
    pool = torch.zeros((2, PAGES, shape.page_size, shape.num_kv_heads, shape.head_dim), dtype=torch.bfloat16)
    step = Step(
        q=torch.zeros((BATCH * Q_LEN, shape.num_qo_heads, shape.head_dim), dtype=torch.bfloat16),
        k=pool[0],
        v=pool[1],
        page_table=torch.zeros((BATCH, width), dtype=torch.int32),
        seq_lens=torch.full((BATCH,), 100, dtype=torch.int32),
        host_kv_lens=None,
        q_len=Q_LEN,
        sm_scale=shape.head_dim**-0.5,
        k_scale=1.0,
        v_scale=1.0,
        max_seq_len=CONTEXT,
    )
    return Capacity(COLUMN, BATCH, PAGES, "cpu"), step, torch.zeros_like(step.q)


def microseconds(calls: dict[str, Callable[[], object]], rounds: int = 40) -> dict[str, float]:
    """The least time each call took, its loop's cost included; in turn, so that a busy moment hits all."""
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    numbers = {name: max(1, timer.autorange()[0] // 40) for name, timer in timers.items()}
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, timer in timers.items():
            least[name] = min(least[name], timer.timeit(numbers[name]) / numbers[name] * 1e6)
    return least


def calls_of(
    route: str, capacity: Capacity, step: Step, out: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """The three calls of one route."""
    contract = Contract(capacity, route=route)
    with_lens = dataclasses.replace(step, host_kv_lens=(100,) * BATCH)
    steps = itertools.cycle([dataclasses.replace(step, host_kv_lens=(n,) * BATCH) for n in (100, 101)])
    for one in (step, with_lens):
        if (error := contract.broken(one, out)) is not None:
            raise SystemExit(f"the benchmark's own call is refused for {route}: {error}")
    return {
        "again": lambda: contract.broken(step, out),
        "same lens": lambda: contract.broken(with_lens, out),
        "new lens": lambda: contract.broken(next(steps), out),
        "first": lambda: check_step(capacity, step, level=Level.STATIC, out=out, route=route),
    }


def measure() -> tuple[float, dict[str, dict[str, float]]]:
    """(a function call, route -> figures), in microseconds."""
    capacity, step, out = operands()
    calls: dict[str, Callable[[], object]] = {"": lambda: None}
    for route in KERNELS:
        for name, call in calls_of(route, capacity, step, out).items():
            calls[f"{route}/{name}"] = call
    least = microseconds(calls)
    return least[""], {route: {name: least[f"{route}/{name}"] for name in NAMES} for route in KERNELS}


def main() -> int:
    """Print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description="Cost of one static contract check, in microseconds.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    floor, figures = measure()
    if as_json:
        rounded = {route: {k: round(v, 3) for k, v in row.items()} for route, row in figures.items()}
        text = json.dumps({"a function call": round(floor, 4), "microseconds": rounded})
    else:
        lines = [f"{'route':<28}" + "".join(f"{name:>12}" for name in NAMES)]
        lines += [
            f"{route:<28}" + "".join(f"{row[n]:>12.2f}" for n in NAMES) for route, row in figures.items()
        ]
        python = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
        text = "\n".join([*lines, f"microseconds a check; a function call {floor:.3f}; {python}"])
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
