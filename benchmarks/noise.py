"""What recorded rounds say about their own noise, and so about what the test of "faster" takes for granted.

    python benchmarks/noise.py SOURCE [SOURCE ...] [--svg FILE]

A source is a study's database (``.db``, ``.db.xz``, a URL) or the JSON lines of ``record_rounds.py``. Needs
no GPU. For each source:

* autocorrelation of the log ratios, and of the signs that the test counts, from one round to the next;
* whether a route's time depends on its place in the round, on the pause before a chunk, on the time since
  the start;
* tails, and widths by pair of routes and by run time;
* the conditions that were read beside the rounds;
* tau: what a cell's ratio moves by from one process to the next, where a cell was timed in several.

Effects are means over cells of differences within a cell, of log times less the cell's own median and cut at
6 robust standard deviations; "+-" is 1.96 standard errors, with the cell as the unit. A cell that was easy
to decide has few rounds: what needs many rounds is known of the others only, and says of how many.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.bench.conditions import Conditions
from benchmarks.recorded import Array, Recording, Recordings, ended, log_times, read, table
from benchmarks.svg import Bar, bars

# Fewer rounds than this say little about a cell by itself.
LEAST = 16
# Rounds from here on are what the earlier ones are held against.
SETTLED_FROM = 16
CUT = 6.0
# Series that can show a dependence of their own, and how much of it is told; white noise of 96 rounds has a
# lag-1 autocorrelation past 0.3 in one series of 600.
LONG, DEPENDENT, SHOWN = 96, 0.3, 6
# Upper edges of the run-time classes, microseconds of the cell's quickest route.
EDGES = (10.0, 20.0, 50.0, 100.0, 1000.0)
# A share of the middle half to a standard deviation, and a median absolute deviation to one (normal).
IQR, MAD = 1.349, 0.6745


@dataclass(frozen=True)
class Effect:
    """A mean of log differences over ``cells`` cells, with 1.96 standard errors."""

    mean: float
    error: float
    cells: int

    @property
    def bound(self) -> float:
        """The largest effect, in either direction, that the interval allows."""
        return abs(self.mean) + self.error

    def __str__(self) -> str:
        return f"{self.mean:+.3%} +- {self.error:.3%}"


def effect(per_cell: Iterable[float]) -> Effect:
    """The mean of one value a cell."""
    values = np.array([value for value in per_cell if np.isfinite(value)])
    if len(values) < 2:
        return Effect(float(values.mean()) if len(values) else 0.0, float("inf"), len(values))
    error = 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5
    return Effect(float(values.mean()), error, len(values))


def spread(values: Array) -> float:
    """Robust standard deviation: the middle half's width over 1.349."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low) / IQR


def residuals(values: Array, reference: Array | None = None) -> Array:
    """``values`` less the median of ``reference`` (of themselves), cut at 6 robust standard deviations."""
    of = values if reference is None else reference
    centred = values - np.median(of)
    limit = CUT * max(spread(of), 1e-12)
    return np.clip(centred, -limit, limit)


def autocorrelation(series: Sequence[Array], lag: int) -> float:
    """Of several series together, each about its own mean; white noise of any length gives 0 on average."""
    together = squares = 0.0
    for values in series:
        n = len(values)
        if n < lag + 2:
            continue
        centred = values - values.mean()
        square = float((centred**2).sum())
        together += float((centred[lag:] * centred[:-lag]).sum()) + square * (n - lag) / (n * (n - 1))
        squares += square
    return together / squares if squares > 0.0 else 0.0


def signs(values: Array) -> Array:
    """+1 above the median, -1 below, 0 at it: what a sign test at the median would see."""
    return np.sign(values - np.median(values))


def bucket(us: float) -> str:
    """The run-time class."""
    low = 0.0
    for high in EDGES:
        if us < high:
            return f"{low:.0f} to {high:.0f} us"
        low = high
    return f"{low:.0f} us and more"


BUCKETS = [bucket(edge - 1) for edge in EDGES] + [bucket(EDGES[-1])]


def series(found: Recordings, least: int = LEAST) -> list[tuple[Recording, tuple[str, str], Array]]:
    """Log ratios of every pair of routes in every recording with enough rounds."""
    listed = []
    for item in found.items:
        for pair in found.pairs:
            values = item.log_ratios(*pair)
            if len(values) >= least:
                listed.append((item, pair, values))
    return listed


def autocorrelations(found: Recordings) -> str:
    """The first section."""
    listed = series(found)
    rows: list[list[object]] = []
    groups: dict[str, list[Array]] = defaultdict(list)
    for item, (a, b), values in listed:
        groups[f"{a} / {b}"].append(values)
        groups[bucket(item.runtime_us)].append(values)
        groups["all"].append(values)
    order = [name for name in groups if "/" in name] + [n for n in BUCKETS if n in groups] + ["all"]
    for name in order:
        each = groups[name]
        single = [autocorrelation([values], 1) for values in each]
        low, middle, high = np.quantile(single, [0.05, 0.5, 0.95])
        expected = 1.645 / np.median([len(values) for values in each]) ** 0.5
        rows.append(
            [
                name,
                len(each),
                *(f"{autocorrelation(each, lag):+.3f}" for lag in (1, 2, 4)),
                f"{autocorrelation([signs(values) for values in each], 1):+.3f}",
                f"{low:+.2f} / {middle:+.2f} / {high:+.2f}",
                f"+-{expected:.2f}",
            ]
        )
    head = (
        "series",
        "n",
        "lag 1",
        "lag 2",
        "lag 4",
        "signs, lag 1",
        "cells: 5 / 50 / 95 %",
        "white noise: 5, 95 %",
    )
    return table(head, rows) + dependent(listed)


def dependent(listed: Sequence[tuple[Recording, tuple[str, str], Array]]) -> str:
    """Long series whose signs depend on each other by far more than chance: what the pooled numbers hide.

    For each of the worst also the step that explains most: medians before and after it.
    """
    long = [(autocorrelation([signs(v)], 1), item, pair, v) for item, pair, v in listed if len(v) >= LONG]
    found = sorted((each for each in long if each[0] > DEPENDENT), key=lambda each: -each[0])
    if not long:
        return ""
    limit = 2.33 / float(np.mean([len(each[3]) for each in long])) ** 0.5
    text = (
        f"\nOf {len(long)} series of {LONG} rounds and more, {len(found)} have signs with a lag-1 "
        f"autocorrelation above {DEPENDENT} (99 % of white noise: below {limit:.2f}).\n"
    )
    if not found:
        return text
    by_pair = Counter(f"{a} / {b}" for _, _, (a, b), _ in found)
    text += f"By ratio: {', '.join(f'{name} {count}' for name, count in by_pair.most_common())}.\n\n"
    rows = []
    for lag1, item, (a, b), values in found[:SHOWN]:
        at = step_of(values)
        cells = [f"{np.exp(np.median(part)):.3f}" for part in (values[:at], values[at:])]
        moved = [
            f"{np.exp(np.nanmedian(item.log_times[name][item.both(a, b)][part])):.1f}"
            for name in (a, b)
            for part in (slice(None, at), slice(at, None))
        ]
        rows.append(
            [
                str(item.cell),
                f"{a} / {b}",
                f"{lag1:+.2f}",
                f"{at} of {len(values)}",
                " -> ".join(cells),
                " -> ".join(moved[:2]),
                " -> ".join(moved[2:]),
            ]
        )
    head = (
        "worst cells",
        "ratio",
        "signs, lag 1",
        "step after",
        "ratio there",
        "first route, us",
        "second, us",
    )
    return text + table(head, rows)


def step_of(values: Array) -> int:
    """Where one step of the mean explains most of the squares; at least 8 values on either side."""
    n = len(values)
    sums = np.cumsum(values)
    at = np.arange(8, n - 7)
    gain = sums[at - 1] ** 2 / at + (sums[-1] - sums[at - 1]) ** 2 / (n - at)
    return int(at[np.argmax(gain)])


def by_place(found: Recordings) -> tuple[dict[tuple[str, str], Effect], dict[tuple[str, str], Effect]]:
    """Effects of a route's place on its time, and of who of two ran first on their ratio.

    Only rounds with as many routes as the recording's first one count: "last" is then one place.

    Returns:
        By (route, place): log time there less that at the route's other places. By pair: the log ratio
        where its first route ran before the other, less that where it ran after.
    """
    places: dict[tuple[str, str], list[float]] = defaultdict(list)
    orders: dict[tuple[str, str], list[float]] = defaultdict(list)
    for item in found.items:
        full = len(item.rounds[0].order)
        whole = np.array([len(r.order) == full for r in item.rounds])
        if whole.sum() < LEAST or full < 2:
            continue
        names = {0: "first", full - 1: "last"}
        for name in item.routes:
            mine = whole & ~np.isnan(item.log_times[name])
            if mine.sum() < LEAST:
                continue
            times = residuals(item.log_times[name][mine])
            at = item.places[name][mine]
            for place in range(full):
                there = at == place
                if there.any() and not there.all():
                    difference = float(times[there].mean() - times[~there].mean())
                    places[name, names.get(place, "between")].append(difference)
        for a, b in found.pairs:
            both = item.both(a, b)
            if both.sum() < LEAST:
                continue
            ratios = residuals(item.log_ratios(a, b))
            before = (item.places[a] < item.places[b])[both]
            if before.any() and not before.all():
                orders[a, b].append(float(ratios[before].mean() - ratios[~before].mean()))
    return (
        {key: effect(values) for key, values in sorted(places.items())},
        {key: effect(values) for key, values in sorted(orders.items())},
    )


def positions(found: Recordings) -> str:
    """The second section."""
    places, orders = by_place(found)
    rows = [[name, place, each.cells, each] for (name, place), each in places.items()]
    text = table(("route", "its place", "cells", "time there against elsewhere"), rows)
    rows = [[f"{a} / {b}", f"{a} before {b}", each.cells, each] for (a, b), each in orders.items()]
    text += "\n" + table(("ratio", "order", "cells", "ratio so against the other way round"), rows)
    if places:
        worst = max(places.items(), key=lambda item: item[1].bound)
        text += (
            f"\nLargest effect of a place on a time that these intervals allow: {worst[1].bound:.2%} "
            f"({worst[0][0]}, {worst[0][1]}).\n"
        )
    return text


Bin = tuple[str, Callable[[int], bool]]

START_UP: tuple[Bin, ...] = (
    ("thrown away: 1st", lambda i: i == 0),
    ("thrown away: 2nd to 4th", lambda i: 1 <= i < 4),
    ("thrown away: 5th to 8th", lambda i: 4 <= i < 8),
    ("thrown away: later", lambda i: i >= 8),
)
AGES: tuple[Bin, ...] = (
    ("counted: 1st", lambda i: i == 0),
    ("counted: 2nd to 4th", lambda i: 1 <= i < 4),
    ("counted: 5th to 8th", lambda i: 4 <= i < 8),
    ("counted: 9th to 16th", lambda i: 8 <= i < SETTLED_FROM),
)


def by_age(found: Recordings) -> list[tuple[str, str, Effect]]:
    """(bin, what, effect): times and ratios of early rounds against those from the 17th counted one on."""
    collected: dict[tuple[str, str], list[float]] = defaultdict(list)

    def add(kind: str, bins: Sequence[Bin], values: Array, late: Array) -> None:
        known = ~np.isnan(values)
        reference = late[~np.isnan(late)]
        if len(reference) < 8 or not known.any():
            return
        limit = CUT * max(spread(reference), 1e-12)
        early = np.clip(values - np.median(reference), -limit, limit)
        base = residuals(reference).mean()
        ages = np.arange(len(values))
        for name, inside in bins:
            here = known & np.array([inside(int(age)) for age in ages], dtype=bool)
            if here.any():
                collected[name, kind].append(float(early[here].mean() - base))

    for item in found.items:
        start = {name: log_times(item.start_up, name) for name in item.routes} if item.start_up else {}
        for bins, times in ((START_UP, start), (AGES, item.log_times)):
            late = {name: item.log_times[name][SETTLED_FROM:] for name in times}
            for name, values in times.items():
                add(f"time of {name}", bins, values, late[name])
            for a, b in found.pairs:
                if a in times and b in times:
                    add(f"{a} / {b}", bins, times[a] - times[b], late[a] - late[b])
    return [
        (name, kind, effect(collected[name, kind]))
        for name, _ in (*START_UP, *AGES)
        for kind in sorted({key[1] for key in collected})
        if (name, kind) in collected
    ]


def after_pauses(found: Recordings) -> dict[str, Effect]:
    """First rounds of chunks, which follow a commit and a look at outputs, against the other rounds."""
    collected: dict[str, list[float]] = defaultdict(list)
    for item in found.items:
        if item.chunk < 2:
            continue
        for pair in found.pairs:
            both = item.both(*pair)
            if both.sum() < LEAST:
                continue
            first = np.array([r.index % item.chunk == 0 for r in item.rounds])[both]
            values = residuals(item.log_ratios(*pair))
            if first.any() and not first.all():
                collected[f"{pair[0]} / {pair[1]}"].append(
                    float(values[first].mean() - values[~first].mean())
                )
    return {key: effect(values) for key, values in sorted(collected.items())}


def transients(found: Recordings) -> str:
    """The third section."""
    rows = [[kind, name, each.cells, each] for name, kind, each in by_age(found)]
    text = table(("what", "rounds", "cells", "against the 17th counted round and later"), rows)
    rows = [[name, "after a pause", each.cells, each] for name, each in after_pauses(found).items()]
    if rows:
        text += "\n" + table(("ratio", "rounds", "cells", "against the chunk's other rounds"), rows)
    if not any(item.start_up for item in found.items):
        text += "\nThe rounds thrown away were not kept here (record_rounds.py keeps them).\n"
    return text


@dataclass(frozen=True)
class Tails:
    """Shares of values past 3 and 5 robust standard deviations, and the median excess kurtosis of a cell."""

    past3: float
    past5: float
    kurtosis: float


def tails_of(each: Sequence[Array]) -> Tails:
    """Of several series together, each about its own median."""
    past3 = past5 = total = 0
    kurtosis = []
    for values in each:
        centred = values - np.median(values)
        robust = float(np.median(np.abs(centred))) / MAD
        if robust <= 0.0:
            continue
        past3 += int((np.abs(centred) > 3 * robust).sum())
        past5 += int((np.abs(centred) > 5 * robust).sum())
        total += len(values)
        about = values - values.mean()
        kurtosis.append(float((about**4).mean() / (about**2).mean() ** 2 - 3.0))
    if not total:
        return Tails(0.0, 0.0, 0.0)
    return Tails(past3 / total, past5 / total, float(np.median(kurtosis)))


def tails(found: Recordings, seed: int = 1) -> str:
    """The fourth section."""
    groups: dict[str, list[Array]] = defaultdict(list)
    for _, (a, b), values in series(found, 24):
        groups[f"{a} / {b}"].append(values)
    rng = np.random.default_rng(seed)
    rows: list[list[object]] = []
    for name, each in sorted(groups.items()):
        normal = tails_of([rng.standard_normal(len(values)) for values in each])
        for label, seen in ((name, tails_of(each)), ("normal, same lengths", normal)):
            count = len(each) if label == name else ""
            rows.append([label, count, f"{seen.past3:.2%}", f"{seen.past5:.2%}", f"{seen.kurtosis:+.2f}"])
    return table(("ratio", "cells", "past 3 sd", "past 5 sd", "excess kurtosis, median cell"), rows)


def widths(found: Recordings) -> dict[tuple[str, str], Array]:
    """Robust standard deviation of each cell's log ratios, by pair (or "all pairs") and run-time class."""
    collected: dict[tuple[str, str], list[float]] = defaultdict(list)
    for item, (a, b), values in series(found):
        width = spread(values)
        pair = f"{a} / {b}"
        for key in ((pair, "all"), (pair, bucket(item.runtime_us)), ("all pairs", bucket(item.runtime_us))):
            collected[key].append(width)
        collected["all pairs", "all"].append(width)
    return {key: np.array(values) for key, values in collected.items()}


def after_lengths(values: Array, log_total: Array) -> Array:
    """``values`` less a parabola in the log of the round's total KV length, by least squares."""
    about = log_total - log_total.mean()
    design = np.stack([np.ones_like(about), about, about**2], axis=1)
    coefficients, *_ = np.linalg.lstsq(design, values, rcond=None)
    left: Array = values - design @ coefficients
    return left


def widths_after_lengths(found: Recordings) -> dict[str, tuple[Array, Array]]:
    """By pair, over cells with 24 rounds and more: widths, and what is left once lengths are taken out."""
    collected: dict[str, list[tuple[float, float]]] = defaultdict(list)
    if found.seed is None:
        return {}
    for item in found.items:
        lengths = item.log_lengths(found.seed) if len(item.rounds) >= 24 else None
        if lengths is None:
            continue
        for a, b in found.pairs:
            both = item.both(a, b)
            if both.sum() >= 24:
                values = item.log_ratios(a, b)
                left = after_lengths(values, lengths[both])
                collected[f"{a} / {b}"].append((spread(values), spread(left)))
    return {
        name: (np.array([each[0] for each in pairs]), np.array([each[1] for each in pairs]))
        for name, pairs in sorted(collected.items())
    }


def width_table(found: Recordings) -> str:
    """The fifth section."""
    rows: list[list[object]] = []
    found_widths = widths(found)
    for key in sorted(found_widths, key=lambda key: (key[0], _rank(key[1]))):
        low, middle, high = np.quantile(found_widths[key], [0.1, 0.5, 0.9])
        most = found_widths[key].max()
        rows.append(
            [*key, len(found_widths[key]), f"{low:.2%}", f"{middle:.2%}", f"{high:.2%}", f"{most:.2%}"]
        )
    text = table(("ratio", "run time", "cells", "10 %", "median", "90 %", "most"), rows)
    rows = []
    for name, (whole, left) in widths_after_lengths(found).items():
        for label, each in ((name, whole), ("the same, lengths taken out", left)):
            low, middle, high = np.quantile(each, [0.1, 0.5, 0.9])
            rows.append([label, len(each), f"{low:.2%}", f"{middle:.2%}", f"{high:.2%}"])
    if rows:
        text += (
            "\nEach round draws new lengths in the cell; a parabola in the log of their sum taken out:\n\n"
        )
        text += table(("ratio", "cells", "10 %", "median", "90 %"), rows)
    return text


def _rank(name: str) -> int:
    return BUCKETS.index(name) if name in BUCKETS else -1


def conditions(found: Recordings) -> str:
    """The sixth section."""
    readings: list[Conditions] = []
    dropped = total = 0
    for item in found.items:
        for round_ in item.rounds:
            total += 1
            dropped += bool(round_.dropped)
            if round_.conditions:
                after: Any = round_.conditions.get("after")
                if after is not None:
                    readings.append(Conditions.from_dict(after))
    text = f"{total} rounds, {dropped} dropped for a slowed-down device; {len(readings)} readings.\n"
    if not readings:
        return text
    reasons = Counter(reason for reading in readings for reason in reading.reasons)
    rows = []
    for name in ("sm_mhz", "memory_mhz", "temperature_c", "power_w"):
        values = [getattr(reading, name) for reading in readings if getattr(reading, name) is not None]
        if values:
            low, middle, high = np.quantile(values, [0.01, 0.5, 0.99])
            rows.append(
                [name, f"{min(values):g}", f"{low:g}", f"{middle:g}", f"{high:g}", f"{max(values):g}"]
            )
    text += "\n" + table(("reading", "least", "1 %", "median", "99 %", "most"), rows)
    said = ", ".join(f"{name} in {count / len(readings):.1%}" for name, count in reasons.most_common())
    return text + f"\nReasons for a lower clock: {said or 'none in any reading'}.\n"


@dataclass(frozen=True)
class Shift:
    """How a ratio moves between processes.

    Attributes:
        tau: standard deviation of a cell's median log ratio from process to process, what the rounds' own
            noise makes of it taken out. 0 where that explains all of it.
        sampling: standard deviation that the rounds' noise explains.
        quantiles: 50, 90 and 99 % of the cells' largest difference between two processes, noise included.
        worst: the cell where it is largest.
    """

    cells: int
    tau: float
    sampling: float
    quantiles: tuple[float, float, float]
    most: float
    worst: str


def shift_of(by_cell: Sequence[tuple[str, Sequence[Array]]]) -> Shift:
    """Args: for each cell its log ratios, one array a process (two or more).

    A median's sampling variance is taken as that of a normal's, (1.2533 x robust sd)^2 / n.
    """
    between, within, largest = [], [], []
    for _, processes in by_cell:
        medians = np.array([np.median(values) for values in processes])
        between.append(float(medians.var(ddof=1)))
        within.append(float(np.mean([(1.2533 * spread(v)) ** 2 / len(v) for v in processes])))
        largest.append(float(np.ptp(medians)))
    tau = max(0.0, float(np.mean(between) - np.mean(within))) ** 0.5
    at = int(np.argmax(largest))
    low, middle, high = np.quantile(largest, [0.5, 0.9, 0.99])
    return Shift(
        len(by_cell),
        tau,
        float(np.mean(within)) ** 0.5,
        (float(low), float(middle), float(high)),
        largest[at],
        by_cell[at][0],
    )


def shifts(found: Recordings, least: int = 8) -> dict[str, Shift]:
    """By pair of routes, over the cells that were timed in several processes.

    What the rounds' lengths explain is taken out first, over all processes of a cell together.
    """
    result = {}
    for a, b in found.pairs:
        cells: dict[str, list[Array]] = defaultdict(list)
        names: dict[str, str] = {}
        lengths: dict[str, list[Array]] = defaultdict(list)
        for item in found.items:
            values = item.log_ratios(a, b)
            drawn = item.log_lengths(found.seed) if found.seed is not None and len(values) >= least else None
            if len(values) >= least:
                cells[item.cell.id].append(values)
                names[item.cell.id] = str(item.cell)
                if drawn is not None:
                    lengths[item.cell.id].append(drawn[item.both(a, b)])
        several = []
        for key, each in cells.items():
            if len(each) < 2:
                continue
            if len(lengths[key]) == len(each):
                left = after_lengths(np.concatenate(each), np.concatenate(lengths[key]))
                each = np.split(left, np.cumsum([len(values) for values in each])[:-1])
            several.append((names[key], each))
        if several:
            result[f"{a} / {b}"] = shift_of(several)
    return result


def processes(found: Recordings) -> str:
    """The last section."""
    rows = [
        [
            name,
            each.cells,
            f"{each.tau:.2%}",
            f"{each.sampling:.2%}",
            " / ".join(f"{value:.2%}" for value in each.quantiles),
            f"{each.most:.2%}",
            each.worst,
        ]
        for name, each in shifts(found).items()
    ]
    if not rows:
        return "No cell was timed in two processes.\n"
    head = ("ratio", "cells", "tau", "rounds' own noise", "difference: 50 / 90 / 99 %", "most", "where")
    return table(head, rows)


SECTIONS: tuple[tuple[str, Callable[[Recordings], str]], ...] = (
    ("Autocorrelation of log ratios", autocorrelations),
    ("Place in the round", positions),
    ("After the start, after a pause", transients),
    ("Tails", tails),
    ("Width of a cell's log ratios (robust standard deviation)", width_table),
    ("Conditions", conditions),
    ("Between processes", processes),
)


def picture(found: Recordings) -> str:
    """The widths by run time, as SVG."""
    each = widths(found)
    pairs = sorted({key[0] for key in each} - {"all pairs"})
    drawn = []
    for name in BUCKETS:
        for pair in pairs:
            if (pair, name) in each:
                low, middle, high = (float(q) for q in np.quantile(each[pair, name], [0.1, 0.5, 0.9]))
                drawn.append(
                    Bar(f"{name}, {pair} ({len(each[pair, name])})", middle * 100, low * 100, high * 100)
                )
    title = f"{found.device}: noise of a paired round, % (bar: median cell, line: 10 to 90 % of cells)"
    return bars(title, drawn, unit="%")


def main(arguments: list[str]) -> int:
    """Print the sections."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the widths of the first source")
    options = parser.parse_args(arguments)

    def run() -> None:
        for index, source in enumerate(options.sources):
            found = read(source)
            cells = len({item.cell.id for item in found.items})
            print(f"# {source}\n\n{found.device}: {cells} cells, {len(found.items)} recordings.")
            for note in found.notes:
                print(f"Left out: {note}")
            for title, section in SECTIONS:
                print(f"\n## {title}\n\n{section(found)}", end="")
            if options.svg is not None and index == 0:
                options.svg.write_text(picture(found), encoding="utf-8")

    return ended(run, "noise")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
