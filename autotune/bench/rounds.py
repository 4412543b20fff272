"""Runs a cell's rounds in the child: every live route once per round, in a fresh random order."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from random import Random
from typing import TYPE_CHECKING

import torch

from autotune.arena.base import Placement
from autotune.bench.clock import (
    BenchError,
    Clock,
    GroupTimes,
    Stand,
    TimingFindingError,
    accusing,
    clock_for,
)
from autotune.bench.outputs import Outputs
from autotune.bench.pools import Pools
from autotune.bench.record import Round, RoundSettings

if TYPE_CHECKING:
    from autotune.arena.base import Arena
    from autotune.bench.conditions import Conditions
    from autotune.checks.base import MakeArena
    from autotune.domain.cell import Cell
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Route

__all__ = ["BenchError", "Round", "RoundSettings", "TimingFindingError", "time_cell"]

# A group never grows past this, however quick a call claims to be.
MOST_CALLS = 10_000
# However slow the rounds are, so many are thrown away.
LEAST_DISCARDED = 4

# Told which route is about to be launched, and "" when none is: a death is put down to the last one told.
Launching = Callable[[str], None]

# What the parent answers to a report: go on with all live routes, stop, or go on with these.
GoOn = Callable[[list[Round]], "bool | Collection[str]"]

# Told what begins: "pools", "open NAME", "start-up", "rounds", "look", "report", "close". For profilers.
Phase = Callable[[str], None]


# Given each round of the start-up, which no one else gets to see.
Discarded = Callable[[Round], None]


def _nothing(text: str) -> None: ...


def _thrown_away(round_: Round) -> None: ...


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
    launching: Launching = _nothing,
    phase: Phase = _nothing,
    discarded: Discarded = _thrown_away,
) -> None:
    """Time ``routes`` against each other in ``cell`` until ``go_on`` or ``settings.max_rounds`` says stop.

    Sessions are opened once. A start-up is run and thrown away; it also finds how many calls make each
    route's group long enough. Within a round all routes see the same lengths and equally shuffled pages; the
    calls of all routes take turns through the operand sets, so that no call finds its pool freshly used.
    Order, lengths and pages of round i depend on (``seed``, i) only: a resume runs the rounds that an
    uninterrupted run would have. A chunk is reported after every live route's output was looked at.

    Args:
        routes: the live routes, proven safe in the cell's column, the fallback first; names differ.
        facts: this machine, for ``Route.supports``.
        seed: of the cell.
        make_arena: where operands and the sessions' buffers live.
        first_round: index of the first round to record; those before it are stored already.
        go_on: gets each chunk of rounds, in order, none of them empty. False (or no names) stops; a
            collection of names leaves only these live.

    Raises:
        BenchError: a route does not support the cell, names repeat, ``go_on`` names a route that is not
            live, a session cannot be opened, or the device has no clock.
        TimingFindingError: a route is at fault: it raised, or its output is wrong. The chunk is not reported.
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
    # a function of its own: with its variables gone, the clock can give the pools' memory back as it is left
    outputs = Outputs(cell, facts, routes, device)
    with _quiet(device), clock_for(device) as clock, make_arena(Placement.TAIL) as arena:
        _time(
            routes,
            cell,
            seed,
            device,
            clock,
            arena,
            outputs,
            settings,
            first_round,
            go_on,
            launching,
            phase,
            discarded,
        )


def _time(
    routes: Sequence[Route],
    cell: Cell,
    seed: int,
    device: str,
    clock: Clock,
    arena: Arena,
    outputs: Outputs,
    settings: RoundSettings,
    first_round: int,
    go_on: GoOn,
    launching: Launching,
    phase: Phase,
    discarded: Discarded,
) -> None:
    """:func:`time_cell` in its arena."""
    live = [route.name for route in routes]
    warm = clock.warm()
    phase("pools")
    pools = Pools.build(
        arena,
        cell,
        count=clock.operand_sets(cell, settings.operand_sets, len(routes)),
        seed=seed,
        device=device,
        shared=clock.shared_metadata,
        interleaved_v_scales=outputs.interleaved_v_scales,
    )
    stands: dict[str, Stand] = {}
    try:
        for route in routes:
            phase(f"open {route.name}")
            launching(route.name)
            with accusing(route.name, device):
                stands[route.name] = clock.stand(
                    route, pools, lambda name, shape, dtype: arena.tensor(name, shape, dtype)
                )
        launching("")
        phase("start-up")
        calls = _start_up(stands, pools, seed, device, settings, launching, warm, discarded)
        chunk: list[Round] = []
        phase("rounds")
        before = clock.monitor.read()
        for index in range(first_round, settings.max_rounds):
            rng = Random(f"{seed}:{index}")
            chunk.append(_one_round(index, live, stands, calls, pools, rng, device, launching))
            if len(chunk) < settings.chunk and index + 1 < settings.max_rounds:
                continue
            after = clock.monitor.read()
            phase("look")
            outputs.look(stands, live, launching)
            phase("report")
            answer = go_on(_under(before, after, chunk))
            phase("rounds")
            chunk, before = [], after
            if not answer:
                return
            if not isinstance(answer, bool):
                if unknown := set(answer) - set(live):
                    raise BenchError(f"{cell}: asked to go on with {sorted(unknown)}, live are {live}")
                live = [name for name in live if name in answer]
    finally:
        phase("close")
        for stand in stands.values():
            stand.close()


def _under(before: Conditions | None, after: Conditions | None, chunk: list[Round]) -> list[Round]:
    """``chunk`` with what was read around it. A slow-down at either end drops all of it: whole rounds, every
    route alike, and whatever their times were."""
    if before is None or after is None:
        return chunk
    dropped = before.slowdown or after.slowdown
    readings = {"before": before.to_dict(), "after": after.to_dict()}
    marked = [replace(round_, dropped=dropped) for round_ in chunk]
    marked[-1] = replace(marked[-1], conditions=readings)
    return marked


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
    stands: dict[str, Stand],
    calls: dict[str, int],
    pools: Pools,
    rng: Random,
    device: str,
    launching: Launching,
) -> Round:
    order = list(names)
    rng.shuffle(order)
    pools.new_round(rng)
    times: dict[str, GroupTimes] = {}
    for name in order:
        launching(name)
        with accusing(name, device):
            times[name] = stands[name].measure(calls[name])
    launching("")
    return Round(
        index=index,
        order=tuple(order),
        run_us={name: times[name].run_us for name in order},
        host_us={name: times[name].host_us for name in order},
        prepare_us={name: times[name].prepare_us for name in order},
        calls={name: times[name].calls for name in order},
    )


def _start_up(
    stands: dict[str, Stand],
    pools: Pools,
    seed: int,
    device: str,
    settings: RoundSettings,
    launching: Launching,
    warm: bool,
    discarded: Discarded,
) -> dict[str, int]:
    """Run the rounds that are thrown away; return the calls per group of each route.

    ``warm``: the device need not be kept busy for ``discard_ms`` first. Slow rounds end with
    ``discard_most_ms``, but for the first four.

    Group sizes follow each route's quickest round: a busy machine only ever adds time. Sizes from a typical
    round came out at 2 and 7 calls for one kernel against itself, and the mean of the longer group catches
    more interruptions: a bias, where groups of equal length meet equally many.
    """
    names = list(stands)
    least_ms = 0.0 if warm else settings.discard_ms
    calls = dict.fromkeys(names, 1)
    quickest = dict.fromkeys(names, float("inf"))
    start = time.perf_counter()
    count, passed_ms = 0, 0.0
    while count < settings.discard_rounds or passed_ms < least_ms:
        if count >= LEAST_DISCARDED and passed_ms >= settings.discard_most_ms:
            break
        rng = Random(f"{seed}:start-up:{count}")
        round_ = _one_round(-1 - count, names, stands, calls, pools, rng, device, launching)
        discarded(round_)
        count, passed_ms = count + 1, (time.perf_counter() - start) * 1e3
        for name in names:
            quickest[name] = min(quickest[name], max(round_.run_us[name], 1e-3))
            needed = ceil(settings.min_group_ms * 1e3 / quickest[name])
            calls[name] = min(max(needed, 1), MOST_CALLS)
    return calls
