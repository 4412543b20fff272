"""Withdraw routes from a table that was already made: rewrite their letters to ``q``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.table.letters import QUARANTINED, RESERVED
from autotune.table.model import Eager, Entry, Grid, Quarantine, Ratio, RoutingTable, Row, Speedup


def apply_quarantine(table: RoutingTable) -> RoutingTable:
    """The same table with every quarantined cell answering the fallback; unchanged if none is.

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
        if item.shape in (None, entry.shape)
        and item.dtypes in (None, entry.dtypes)
        and item.q_len in (None, entry.q_len)
    ]
    if not relevant:
        return entry
    letter_of = {name: letter for letter, name in legend.items() if letter not in RESERVED}

    def gone(low: int, high: int) -> set[str]:
        return {
            letter_of[item.route]
            for item in relevant
            if item.route in letter_of and (item.batch_size is None or low <= item.batch_size <= high)
        }

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


def _mask(grid: Grid, speedup: Speedup, gone: list[set[str]], max_context: int) -> tuple[Grid, Speedup]:
    rows: list[Row] = []
    low: list[tuple[Ratio, ...]] = []
    for row, bounds in zip(grid.rows, speedup.low, strict=True):
        hits = [letter in letters for letter, letters in zip(row.letters, gone, strict=True)]
        rows.append(
            Row(
                row.kv_high,
                "".join(
                    QUARANTINED if hit else letter for letter, hit in zip(row.letters, hits, strict=True)
                ),
            )
        )
        low.append(tuple(None if hit else bound for bound, hit in zip(bounds, hits, strict=True)))
    return Grid.of(tuple(rows), max_context), Speedup(tuple(low), speedup.vs_stock)
