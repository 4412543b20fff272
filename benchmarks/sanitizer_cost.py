"""What compute-sanitizer costs: the same launches in a process under it and in one without.

    python -m benchmarks.sanitizer_cost xqa-decode [--device cuda] [--launches 20]

is such a process; ``guard_cost.py`` starts them in turn and compares. It opens the route in one small column,
in plain memory, launches it, and says at once how far it is and what each launch took, so that one which is
cut off has told what it saw. A launch is a call and the wait for its end, not a graph's replay.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.routes.planted_xqa import COLUMN
from autotune.sanitizer import tool
from autotune.sanitizer.examine import Ended, judge
from autotune.sanitizer.process import capture
from autotune.sanitizer.report import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.tuner.deadline import Deadline

# The CUDA one is the controls': a proof there takes 7 to 8 s under the tool on an H200.
COLUMNS = {
    "cuda": COLUMN,
    "cpu": Column(Shape(4, 2, 64, 16), PROFILES["bf16"], q_len=4, batch_size=4, max_context=512),
}
KV_LENS = (300, 64, 129, 300)
WARM_UP, LAUNCHES, ROUNDS = 3, 20, 3
# For all processes, and for one.
LIMIT_S, PROCESS_S = 90.0, 60.0
# A process that would have less is not begun; one that ends in time takes no longer than before, nearly.
LEAST_S, LONGER = 3.0, 1.2
SAYS = "sanitizer_cost:"
UNDER, PLAIN = "under the tool", "without it"


@dataclass(frozen=True)
class Run:
    """One process.

    Attributes:
        seconds: of the whole process; None where it was cut off.
        launches: microseconds of each that it told.
        at: what it told last.
    """

    seconds: float | None
    launches: tuple[float, ...]
    at: str


@dataclass(frozen=True)
class Cost:
    """Medians under the tool and without it.

    Attributes:
        launch_us: of one launch.
        process_s: of a whole process, imports and set-up included; None where none came to its end.
        launches: how many the medians are of.
    """

    route: str
    launch_us: tuple[float, float]
    process_s: tuple[float | None, float | None]
    launches: tuple[int, int]
    said: str = ""

    @property
    def factor(self) -> float:
        """How many times longer a launch takes."""
        return self.launch_us[0] / self.launch_us[1]

    def line(self) -> str:
        """In words."""
        (under, plain), (many, few) = self.launch_us, self.launches
        whole = [f"{each:.1f} s" if each is not None else "cut off" for each in self.process_s]
        more = f"; {self.said}" if self.said else ""
        return (
            f"{self.route}, one small column: a launch takes {under:,.0f} us with compute-sanitizer, "
            f"{plain:,.0f} us without ({self.factor:.1f} x, {many} and {few} launches); "
            f"its whole process {whole[0]} and {whole[1]}{more}"
        )


@dataclass
class Look:
    """What the processes have told so far: whatever ends the benchmark, this stands.

    Attributes:
        said: why there are no more, or no number at all.
    """

    route: str = ""
    runs: dict[str, list[Run]] = field(default_factory=lambda: {UNDER: [], PLAIN: []})
    said: str = "not reached"

    def cost(self) -> Cost | None:
        """The numbers, as soon as both ways have told a launch."""
        times = [[us for run in self.runs[way] for us in run.launches] for way in (UNDER, PLAIN)]
        if not all(times):
            return None
        seconds = [
            [run.seconds for run in self.runs[way] if run.seconds is not None] for way in (UNDER, PLAIN)
        ]
        under, plain = (statistics.median(each) if each else None for each in seconds)
        return Cost(
            self.route,
            (statistics.median(times[0]), statistics.median(times[1])),
            (under, plain),
            (len(times[0]), len(times[1])),
            self.said,
        )

    def line(self) -> str:
        """What is told: the numbers, or why there are none."""
        found = self.cost()
        return found.line() if found is not None else f"no number: {self.said}"


class _NoNumberError(Exception):
    """The tool or the route does not work here."""


def measure(route: str, device: str, look: Look, deadline: Deadline, rng: random.Random) -> None:
    """Processes of both kinds in random order, the first without the tool, into ``look``.

    Ends after ``ROUNDS`` of each, at ``deadline``, or where one of them fails.
    """
    look.route = route
    if device != "cuda":
        look.said = "compute-sanitizer is for CUDA"
        return
    if (path := tool.find()) is None:
        look.said = "compute-sanitizer is not installed"
        return
    look.said = "cut off"  # until it comes to its end
    # whether the route runs at all is known without the tool, which then finds files in the page cache
    order = [PLAIN, UNDER]
    for _ in range(ROUNDS - 1):
        order += rng.sample((PLAIN, UNDER), 2)
    for way in order:
        took = max((run.seconds or 0.0 for run in look.runs[way]), default=0.0)
        if deadline.left < max(LEAST_S, LONGER * took):
            look.said = "" if look.runs[way] else "no time left"
            return
        try:
            run = _run(path if way == UNDER else None, words(route, device), min(PROCESS_S, deadline.left))
        except (_NoNumberError, OSError) as error:
            look.said = " ".join(str(error).split())
            return
        look.runs[way].append(run)
        if run.seconds is None:
            look.said = f"the process {way} was cut off after: {run.at}"
            return
    look.said = ""


def words(route: str, device: str) -> list[str]:
    """What is started."""
    return [sys.executable, "-m", "benchmarks.sanitizer_cost", route, "--device", device]


def _run(path: Path | None, program: list[str], limit_s: float) -> Run:
    """``program``, under the tool at ``path`` if there is one.

    Raises:
        _NoNumberError: it found a fault, does not work here, or the program failed.
        OSError: nothing can be started.
    """
    env = tool.environment("", limit_s)
    root = str(Path(__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join(each for each in (root, env.get("PYTHONPATH")) if each)
    start = time.perf_counter()
    captured = capture([str(path), *tool.OPTIONS, *program] if path else program, env, limit_s)
    seconds = time.perf_counter() - start
    told = [line.removeprefix(SAYS).strip() for line in captured.output.splitlines() if line.startswith(SAYS)]
    if path is not None:
        found = judge(captured, parse(captured.output), limit_s)
        if found.ended not in (Ended.NOTHING, Ended.LATE):
            raise _NoNumberError(found.note)
    if not captured.late and captured.status != 0:
        last = captured.output.strip()[-300:]
        raise _NoNumberError(f"the process ended with status {captured.status}: {last}")
    launches = tuple(float(line.split()[1]) for line in told if line.startswith("launch "))
    return Run(None if captured.late else seconds, launches, told[-1] if told else "its start")


def launch(name: str, device: str, count: int) -> None:
    """Open the route and launch it, telling what each launch took."""
    import torch

    from autotune.arena.operands import Recipe, build, capacity_of
    from autotune.arena.plain import PlainArena
    from autotune.routes.base import Need
    from autotune.worker.jobs import child_route

    def tell(text: str) -> None:
        print(f"{SAYS} {text}", flush=True)

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    torch.set_num_threads(1)
    route, column, recipe = child_route(name), COLUMNS[device], Recipe(KV_LENS, seed=1)
    tell("imports")
    with torch.inference_mode(), PlainArena(device) as arena:
        operands = build(arena, column, recipe, device)
        if Need.HOST_KV_LENS not in route.needs:
            operands.step.host_kv_lens = None
        wait()
        tell("operands")
        session = route.open(capacity_of(column, recipe, device), arena.tensor)
        session.prepare(operands.step)
        for _ in range(WARM_UP):
            session.run(operands.out)
        wait()
        tell("first launches")
        for _ in range(count):
            start = time.perf_counter()
            session.run(operands.out)
            wait()
            tell(f"launch {(time.perf_counter() - start) * 1e6:.1f} us")
        session.close()


def main(given: Sequence[str] | None = None) -> int:
    """One process: see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("route")
    parser.add_argument("--device", choices=tuple(COLUMNS), default="cuda")
    parser.add_argument("--launches", type=int, default=LAUNCHES)
    options = parser.parse_args(given)
    from autotune.cli.in_process import limit_time

    limit_time()
    try:
        launch(options.route, options.device, options.launches)
    except Exception as error:  # whatever a library raises: whoever started this shows the line
        print(
            f"sanitizer_cost: {type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
