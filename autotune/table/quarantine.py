"""Withdraw routes from a table that was already made: rewrite their letters to ``q``.

Where the withdrawn route is an entry's fallback, ``#``: there is nothing left that could be answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.table.letters import NO_SAFE_ROUTE, QUARANTINED, RESERVED
from autotune.table.model import Eager, Entry, Grid, Quarantine, Ratio, RoutingTable, Row, Speedup


def apply_quarantine(table: RoutingTable) -> RoutingTable:
    """The same table with every quarantined cell answering the fallback; unchanged if none is.

    A cell whose fallback is quarantined has no safe route, whatever it named: its letter says faster than
    that fallback, and calls that do not meet the letter's conditions would be answered with it.

    An ``any`` row is derived again, and proofs of routes that are no longer named are dropped.
    The router applies this to every table it loads, so a quarantine binds even where letters were left.
    """
    if not table.quarantine:
        return table
    return replace(
        table, entries=tuple(_withdraw(entry, table.quarantine, table.legend) for entry in table.entries)
    )


def _withdraw(entry: Entry, items: tuple[Quarantine, ...], legend: Mapping[str, str]) -> Entry:
    relevant = [
        item
        for item in items
        if item.of_kind(entry.shape, entry.dtypes) and item.q_len in (None, entry.q_len)
    ]
    if not relevant:
        return entry
    letter_of = {name: letter for letter, name in legend.items() if letter not in RESERVED}

    def gone(low: int, high: int) -> set[str] | None:
        routes = {item.route for item in relevant if item.covers(entry.q_len, low, high)}
        if entry.fallback in routes:
            return None
        return {letter_of[route] for route in routes if route in letter_of}

    captured = [gone(size, size) for size in entry.batch_size]
    routes, speedup = _mask(entry.routes, entry.speedup, captured, entry.max_context)
    eager = entry.eager
    if eager:
        intervals = [gone(low, high) for low, high in eager.intervals]
        eager = Eager(eager.intervals, *_mask(eager.routes, eager.speedup, intervals, entry.max_context))
    named = {
        legend[letter]
        for grid in (routes, *([eager.routes] if eager else []))
        for row in grid.rows
        for letter in row.letters
    }
    proof = tuple(block for block in entry.proof if block.route in named)
    return replace(entry, routes=routes, speedup=speedup, eager=eager, proof=proof)


def _mask(
    grid: Grid, speedup: Speedup, gone: list[set[str] | None], max_context: int
) -> tuple[Grid, Speedup]:
    # Per column: the letters that go, or None where the fallback itself goes.
    rows: list[Row] = []
    low: list[tuple[Ratio, ...]] = []
    vs_stock: list[tuple[Ratio, ...]] = []
    for row, bounds, stock in zip(grid.rows, speedup.low, speedup.vs_stock, strict=True):
        letters = "".join(_masked(letter, out) for letter, out in zip(row.letters, gone, strict=True))
        rows.append(Row(row.kv_high, letters))
        low.append(
            tuple(
                None if letter in RESERVED else bound for letter, bound in zip(letters, bounds, strict=True)
            )
        )
        # A ratio of the withdrawn route says nothing of what answers now.
        kept = zip(row.letters, letters, stock, strict=True)
        vs_stock.append(tuple(ratio if was == letter else None for was, letter, ratio in kept))
    return Grid.of(tuple(rows), max_context), Speedup(tuple(low), tuple(vs_stock))


def _masked(letter: str, out: set[str] | None) -> str:
    if out is None:
        return NO_SAFE_ROUTE
    return QUARANTINED if letter in out else letter
