"""Runs a cell's rounds in the child: every live route once per round, in a fresh random order."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from random import Random
from typing import TYPE_CHECKING

import torch

from autotune.arena.base import Placement
from autotune.bench.clock import BenchError, Clock, GroupTimes, clock_for
from autotune.bench.pools import Pools
from autotune.bench.record import Round, RoundSettings

if TYPE_CHECKING:
    from autotune.checks.base import MakeArena
    from autotune.domain.cell import Cell
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Route, Session

__all__ = ["BenchError", "Round", "RoundSettings", "time_cell"]

# A group never grows past this, however quick a call claims to be.
MOST_CALLS = 10_000

# Told which route is about to be launched, and "" when none is: a death is put down to the last one told.
Launching = Callable[[str], None]

# What the parent answers to a report: go on with all live routes, stop, or go on with these.
GoOn = Callable[[list[Round]], "bool | Collection[str]"]


def time_cell(
    routes: Sequence[Route],
    cell: Cell,
    facts: Facts,
    *,
    seed: int,
    device: str,
    make_arena: MakeArena,
    settings: RoundSettings,
    first_round: int,
    go_on: GoOn,
    launching: Launching = lambda name: None,
) -> None:
    """Time ``routes`` against each other in ``cell`` until ``go_on`` or ``settings.max_rounds`` says stop.

    Sessions are opened once. A start-up is run and thrown away; it also finds how many calls make each
    route's group long enough. Within a round all routes see the same lengths and equally shuffled pages; the
    calls of all routes take turns through the operand sets, so that no call finds its pool freshly used.
    Order, lengths and pages of round i depend on (``seed``, i) only: a resume runs the rounds that an
    uninterrupted run would have.

    Args:
        routes: the live routes, proven safe in the cell's column; names differ.
        facts: this machine, for ``Route.supports``.
        seed: of the cell.
        make_arena: where operands and the sessions' buffers live.
        first_round: index of the first round to record; those before it are stored already.
        go_on: gets each chunk of rounds, in order, none of them empty. False (or no names) stops; a
            collection of names leaves only these live.

    Raises:
        BenchError: a route does not support the cell, names repeat, ``go_on`` names a route that is not
            live, or the device has no clock.
        ArenaError: memory could not be mapped.
    """
    names = [route.name for route in routes]
    if not names or len(set(names)) != len(names):
        raise BenchError(f"{cell}: routes to time must be named once each, not {names}")
    for route in routes:
        if reason := route.supports(cell.column, facts):
            raise BenchError(f"{cell}: {route.name} cannot be timed: {reason}")
    if first_round >= settings.max_rounds:
        return
    clock = clock_for(device)
    with _quiet(device), make_arena(Placement.TAIL) as arena:
        pools = Pools.build(arena, cell, count=settings.operand_sets, seed=seed, device=device)
        sessions: dict[str, Session] = {}
        try:
            for route in routes:
                launching(route.name)
                sessions[route.name] = route.open(
                    pools.capacity, lambda name, shape, dtype: arena.tensor(name, shape, dtype)
                )
            launching("")
            calls = _start_up(sessions, pools, clock, seed, settings, launching)
            live = names
            chunk: list[Round] = []
            for index in range(first_round, settings.max_rounds):
                chunk.append(
                    _one_round(
                        index, live, sessions, calls, pools, clock, Random(f"{seed}:{index}"), launching
                    )
                )
                if len(chunk) < settings.chunk and index + 1 < settings.max_rounds:
                    continue
                answer = go_on(chunk)
                chunk = []
                if not answer:
                    return
                if not isinstance(answer, bool):
                    if unknown := set(answer) - set(live):
                        raise BenchError(f"{cell}: asked to go on with {sorted(unknown)}, live are {live}")
                    live = [name for name in live if name in answer]
        finally:
            for session in sessions.values():
                session.close()


@contextmanager
def _quiet(device: str) -> Iterator[None]:
    """No garbage collection, no autograd, one CPU thread: restored afterwards."""
    collecting, threads = gc.isenabled(), torch.get_num_threads()
    gc.disable()
    if device == "cpu":  # with two threads and any busy neighbour, libgomp's spinning gave stalls of 8-24 ms
        torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


def _one_round(
    index: int,
    names: Sequence[str],
    sessions: dict[str, Session],
    calls: dict[str, int],
    pools: Pools,
    clock: Clock,
    rng: Random,
    launching: Launching,
) -> Round:
    order = list(names)
    rng.shuffle(order)
    pools.new_round(rng)
    times: dict[str, GroupTimes] = {}
    for name in order:
        steps = pools.take(calls[name])
        launching(name)
        times[name] = clock.measure(sessions[name], steps)
    launching("")
    return Round(
        index=index,
        order=tuple(order),
        run_us={name: times[name].run_us for name in order},
        host_us={name: times[name].host_us for name in order},
        prepare_us={name: times[name].prepare_us for name in order},
        calls={name: calls[name] for name in order},
    )


def _start_up(
    sessions: dict[str, Session],
    pools: Pools,
    clock: Clock,
    seed: int,
    settings: RoundSettings,
    launching: Launching,
) -> dict[str, int]:
    """Run the rounds that are thrown away; return the calls per group of each route.

    Group sizes follow each route's quickest round: a busy machine only ever adds time. Sizes from a typical
    round came out at 2 and 7 calls for one kernel against itself, and the mean of the longer group catches
    more interruptions: a bias, where groups of equal length meet equally many.
    """
    names = list(sessions)
    calls = dict.fromkeys(names, 1)
    quickest = dict.fromkeys(names, float("inf"))
    start = time.perf_counter()
    count = 0
    while count < settings.discard_rounds or (time.perf_counter() - start) * 1e3 < settings.discard_ms:
        rng = Random(f"{seed}:start-up:{count}")
        round_ = _one_round(-1 - count, names, sessions, calls, pools, clock, rng, launching)
        count += 1
        for name in names:
            quickest[name] = min(quickest[name], max(round_.run_us[name], 1e-3))
            needed = ceil(settings.min_group_ms * 1e3 / quickest[name])
            calls[name] = min(max(needed, 1), MOST_CALLS)
    return calls
