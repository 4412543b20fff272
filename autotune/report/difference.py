"""Two tables' differences for people and as JSON: runs of equal changes are one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.report.grid import ratio

if TYPE_CHECKING:
    from autotune.domain.dtypes import DTypes
    from autotune.domain.shape import Shape
    from autotune.table.diff import Batch, Change, Difference, TableDiff
    from autotune.table.model import Ratio, RoutingTable

# More lines than this are no overview; --json has all.
MOST_LINES = 60
ABSENT = "(not in it)"


@dataclass(frozen=True, slots=True)
class Fold:
    """Changes that read alike: the same rows of the same entry, over some batches and accept lengths.

    ``kv_low`` and ``kv_high`` are None for the ``any`` row.
    """

    shape: Shape
    dtypes: DTypes
    q_lens: tuple[int, ...]
    batches: tuple[Batch, ...]
    kv_low: int | None
    kv_high: int | None
    before: str | None
    after: str | None
    changes: tuple[Change, ...]


def fold(changes: Sequence[Change]) -> tuple[Fold, ...]:
    """Adjacent rows of a column with the same change become one, then equal columns, then equal q_len.

    The first row starts at q_len, so its lower end is shown as 1.
    """
    runs = [run for _, column in groupby(changes, key=_column) for run in _runs(list(column))]
    batches = _merge(runs, lambda each: (each.shape, each.dtypes, each.q_lens, *_what(each)))
    return tuple(_merge(batches, lambda each: (each.shape, each.dtypes, each.batches, *_what(each))))


def _column(change: Change) -> tuple[object, ...]:
    return change.shape, change.dtypes, change.q_len, change.max_context, change.batch


def _what(each: Fold) -> tuple[object, ...]:
    return each.kv_low, each.kv_high, each.before, each.after


def _runs(column: list[Change]) -> Iterable[Fold]:
    """Runs of rows of one column, its ``any`` row by itself."""
    run: list[Change] = []
    for change in column:
        goes_on = (
            run
            and run[-1].kv_high is not None
            and change.kv_low == run[-1].kv_high + 1
            and (change.before, change.after) == (run[-1].before, run[-1].after)
        )
        if run and not goes_on:
            yield _of_run(run)
            run = []
        run.append(change)
    if run:
        yield _of_run(run)


def _of_run(run: list[Change]) -> Fold:
    first, last = run[0], run[-1]
    return Fold(
        shape=first.shape,
        dtypes=first.dtypes,
        q_lens=(first.q_len,),
        batches=(first.batch,),
        kv_low=1 if first.kv_low == first.q_len else first.kv_low,
        kv_high=last.kv_high,
        before=first.before,
        after=first.after,
        changes=tuple(run),
    )


def _merge(folds: Iterable[Fold], key: Any) -> list[Fold]:
    groups: dict[object, list[Fold]] = {}
    for each in folds:
        groups.setdefault(key(each), []).append(each)
    return [
        replace(
            same[0],
            q_lens=tuple(dict.fromkeys(q_len for each in same for q_len in each.q_lens)),
            batches=tuple(dict.fromkeys(batch for each in same for batch in each.batches)),
            changes=tuple(change for each in same for change in each.changes),
        )
        for same in groups.values()
    ]


def difference_json(old: RoutingTable, new: RoutingTable, found: TableDiff) -> dict[str, Any]:
    """Everything, one item a place."""
    return {
        "same": found.same,
        "digests": [old.digest, new.digest],
        "generated": [old.generated._asdict(), new.generated._asdict()],
        "differences": [each._asdict() for each in found.differences],
        "places": found.places,
        "changes": [_change_json(change) for change in found.changes],
    }


def _change_json(change: Change) -> dict[str, Any]:
    return {
        "shape": change.shape.to_dict(),
        "dtypes": change.dtypes.to_dict(),
        "q_len": change.q_len,
        "max_context": change.max_context,
        "batch": change.batch,
        "kv_low": change.kv_low,
        "kv_high": change.kv_high,
        "before": change.before,
        "after": change.after,
        "low": {"before": change.low[0], "after": change.low[1]},
        "vs_stock": {"before": change.vs_stock[0], "after": change.vs_stock[1]},
    }


def difference_text(
    old: RoutingTable, new: RoutingTable, files: tuple[Path, Path], found: TableDiff
) -> RenderableType:
    """Facts, policy and routes first, then the letters, folded; one line where nothing differs."""
    if found.same:
        exactly = "the same table" if old.digest == new.digest else "times, ratios and counts apart, the same"
        return Text(f"{exactly}: no fact, policy, route or letter differs in {found.places} cells")
    parts: list[RenderableType] = []
    if found.differences:
        parts += [_differences(found.differences, files), ""]
    cells = [change for change in found.changes if change.kv_high is not None]
    both = sum(change.before is not None and change.after is not None for change in cells)
    if found.changes:
        folds = fold(found.changes)
        parts.append(_changes(folds[:MOST_LINES]))
        if more := folds[MOST_LINES:]:
            places = sum(len(each.changes) for each in more)
            parts.append(
                Text(f"and {places} places more in {len(more)} groups; --json has all", style="yellow")
            )
        parts.append("")
    parts.append(
        Text(
            f"letters differ in {both} of the {found.places} cells that both have; {len(cells) - both} cells "
            "that only one has"
        )
    )
    return Group(*parts)


def _differences(differences: Iterable[Difference], files: tuple[Path, Path]) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("what")
    for file in files:
        grid.add_column(Text(str(file)))
    for each in differences:
        what = each.what if each.entries == 1 else f"{each.what} ({each.entries} entries)"
        grid.add_row(Text(what), Text(_value(each.before)), Text(_value(each.after)))
    return grid


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "nothing"
    return " ".join(str(value).split())


def _changes(folds: Iterable[Fold]) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("shape", "q_len", "batch", "kv", "before", "after", "low", "vs stock"):
        grid.add_column(name)
    for each in folds:
        kv = "any" if each.kv_high is None else f"{each.kv_low}..{each.kv_high}"
        grid.add_row(
            Text(_shape(each)),
            Text(spans(each.q_lens)),
            Text(", ".join(f"{b[0]}..{b[1]}" if isinstance(b, tuple) else str(b) for b in each.batches)),
            Text(kv),
            Text(each.before or ABSENT),
            Text(each.after or ABSENT),
            Text(_ratios([change.low for change in each.changes])),
            Text(_ratios([change.vs_stock for change in each.changes])),
        )
    return grid


def _shape(each: Fold) -> str:
    shape, dtypes = each.shape, each.dtypes
    window = f" window {shape.window_left}" if shape.window_left >= 0 else ""
    heads = f"{shape.num_qo_heads}/{shape.num_kv_heads}/{shape.head_dim}"
    return f"{heads} {dtypes.q}/{dtypes.kv}/{dtypes.out}{window}"


def spans(numbers: Sequence[int]) -> str:
    """``1-4, 8``: ascending numbers, neighbours drawn together."""
    text, ordered = [], sorted(numbers)
    start = ordered[0]
    for left, right in pairwise([*ordered, None]):
        if right != left + 1:  # type: ignore[operator]
            text.append(str(start) if start == left else f"{start}-{left}")
            start = right  # type: ignore[assignment]
    return ", ".join(text)


def _ratios(pairs: Iterable[tuple[Ratio, Ratio]]) -> str:
    before, after = zip(*pairs, strict=True)
    return "" if not any((*before, *after)) else f"{_range(before)} -> {_range(after)}"


def _range(values: Iterable[Ratio]) -> str:
    known = [value for value in values if value is not None]
    if not known or min(known) == max(known):
        return ratio(min(known, default=None))
    return f"{ratio(min(known))}..{ratio(max(known))}"
