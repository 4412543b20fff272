"""Where each of the two CPU routes wins, on this machine: ``python benchmarks/routes_cpu.py``.

A round runs both routes once, in random order, on the same operands; its value is the ratio
torch-sdpa / torch-splitkv, so above 1 the split is faster. Shown are the median and the middle 80 % of the
rounds, the median times, and what ``prepare`` takes. One torch thread, and its processor time: a busy
neighbour then costs cache misses, but no waiting. Lengths are ragged in (kv / 2, kv], pages are shuffled.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time

import torch

from autotune.arena.operands import Recipe, build, capacity_of
from autotune.arena.plain import PlainArena
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.routes.base import Session
from autotune.routes.registry import routes

SHAPE = Shape(num_qo_heads=8, num_kv_heads=1, head_dim=128, page_size=16)
BASE, CANDIDATE = "torch-sdpa", "torch-splitkv"
WARM_UP = 5


def timed(session: Session, out: torch.Tensor) -> float:
    """Processor microseconds of one run."""
    start = time.thread_time_ns()
    session.run(out)
    return (time.thread_time_ns() - start) / 1e3


def measure(column: Column, kv: int, seconds: float, seed: int) -> str:
    """One line of the table."""
    draw = random.Random(seed)
    lens = tuple(draw.randint(max(column.q_len, kv // 2 + 1), kv) for _ in range(column.batch_size))
    with PlainArena() as arena:
        operands = build(arena, column, Recipe(lens, seed), "cpu")
        capacity = capacity_of(column, operands.recipe, "cpu")
        known, sessions, prepare = routes("cpu"), {}, {}
        for name in (BASE, CANDIDATE):
            session = known[name].open(capacity, lambda name, shape, dtype: arena.tensor(name, shape, dtype))
            session.prepare(operands.step)
            for _ in range(WARM_UP):
                session.run(operands.out)
            start = time.thread_time_ns()
            session.prepare(operands.step)
            prepare[name] = (time.thread_time_ns() - start) / 1e3
            sessions[name] = session
        times: dict[str, list[float]] = {BASE: [], CANDIDATE: []}
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(times[BASE]) < 10:
            for name in draw.sample([BASE, CANDIDATE], 2):
                times[name].append(timed(sessions[name], operands.out))
    ratios = [base / other for base, other in zip(times[BASE], times[CANDIDATE], strict=True)]
    tenths = statistics.quantiles(ratios, n=10)
    return (
        f"{column.dtypes.q:5} {column.q_len:5} {column.batch_size:5} {kv:6} "
        f"{statistics.median(times[BASE]):10.0f} {statistics.median(times[CANDIDATE]):10.0f} "
        f"{statistics.median(ratios):7.2f}   {tenths[0]:.2f}..{tenths[-1]:.2f} {len(ratios):7} "
        f"{prepare[BASE]:9.0f} {prepare[CANDIDATE]:8.0f}\n"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--q-len", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--kv", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each line (default 0.3)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(
        "dtype q_len batch     kv  sdpa (us) split (us)   ratio   80 % of them  rounds  prepare sdpa, split\n"
    )
    for dtype, q_len, batch, kv in itertools.product(args.dtype, args.q_len, args.batch, args.kv):
        column = Column(SHAPE, PROFILES[dtype], q_len, batch, max(args.kv))
        sys.stdout.write(measure(column, kv, args.seconds, args.seed))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
