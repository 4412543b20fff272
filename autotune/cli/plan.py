"""``autotune plan``: what a run would do, on any machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.cli.filters import Filters
from autotune.cli.gathered import gathered
from autotune.cli.options import (
    EngineName,
    Gpu,
    Json,
    PlanBudget,
    Routes,
    Search,
    SearchName,
    SpaceFile,
    TrafficFile,
)

if TYPE_CHECKING:
    from autotune.space.grid import Entry


@gathered
def command(
    gpu: Gpu = None,
    engine: EngineName = "generic",
    space: SpaceFile = None,
    filters: Filters = Filters(),  # noqa: B008 - frozen
    only: Routes = None,
    budget: PlanBudget = None,
    strategy: Search = SearchName.EXHAUSTIVE,
    traffic: TrafficFile = None,
    json: Json = False,
) -> int:
    """List cells, columns, routes and the estimated time of a run. Needs no GPU."""
    from autotune.cli.budget import seconds as duration
    from autotune.cli.context import all_routes, ask
    from autotune.cli.output import print_json, print_text
    from autotune.cli.search import require_search, weights
    from autotune.hardware.memory import too_large
    from autotune.tuner.cost import predict_again, predict_all, within

    require_search(strategy, budget, traffic)
    limit = None if budget is None else duration(budget)
    grid = ask(gpu, engine, space, filters).grid
    device = grid.space.device
    place = grid.engine.on(grid.architecture)
    memory = device.memory_gib or None
    large = sum(
        memory is not None and too_large(item.cell, memory, workspace_bytes=grid.engine.workspace_bytes)
        for item in grid.cells
    )
    known = sorted(all_routes(device.kind, only))
    timed = [name for name in place.deployable if only is None or name in known]
    adaptive = strategy is SearchName.ADAPTIVE
    weighed = None if traffic is None else weights(grid, traffic)
    cells = [item.cell for item in grid.cells if weighed is None or item.cell.id in weighed.by_cell]
    # the adaptive search proves and times one candidate a cell, if the first one wins
    routes = 2 if adaptive else max(2, len(timed))
    again = predict_again(cells, device.kind, routes)
    seconds = predict_all(cells, device.kind, routes) + again.seconds
    reached = None
    if adaptive and limit is not None:
        by_cell = None if weighed is None else weighed.by_cell
        reached = within(cells, device.kind, limit, by_cell)
        # a budget that ends before the cells do still pays for the second timings that are due by then
        part = predict_again(cells[:reached], device.kind, routes, last=reached == len(cells))
        reached = within(cells, device.kind, max(0.0, limit - part.seconds), by_cell)
    plan: dict[str, Any] = {
        "gpu": grid.space.gpu,
        "device": str(device),
        "engine": grid.engine.name,
        "mode": place.mode,
        "fallback": list(place.fallback),
        "stock": place.stock,
        "deployable": list(place.deployable),
        "timed": timed,
        "installed": known,
        "objectives": list(grid.space.objectives),
        "columns": len(grid.columns),
        "cells": len(grid.cells),
        "picked_of": None if grid.whole is None else len(grid.whole.cells),
        "too_large": large,
        "kv_rows_past_max_context": list(grid.dropped_kv),
        "strategy": strategy.value,
        "budget_seconds": limit,
        "cells_with_traffic": None if weighed is None else len(cells),
        "calls_without_a_cell": None if weighed is None else weighed.unmatched,
        "cells_within_budget": reached,
        "estimated_seconds": round(seconds, 1),
        "second_timings": {
            "cells": again.cells,
            "seconds": round(again.seconds, 1),
            "near_claim_seconds_at_most": round(again.near, 1),
        },
        "entries": [_entry(entry) for entry in grid.entries],
    }
    if json:
        print_json(plan)
    else:
        print_text(_text(plan))
    return 0


def _entry(entry: Entry) -> dict[str, Any]:
    shape = entry.shape
    return {
        "heads": f"{shape.num_qo_heads}/{shape.num_kv_heads}/{shape.head_dim}",
        "page_size": shape.page_size,
        "kv_layout": shape.kv_layout,
        "window_left": shape.window_left,
        "sinks": shape.sinks,
        "dtypes": entry.dtypes.to_dict(),
        "q_len": entry.q_len,
        "max_context": entry.max_context,
        "batch_size": list(entry.batch_sizes),
        "eager": [list(interval) for interval in entry.intervals],
        "kv_len": [high for _, high in entry.rows],
        "models": list(entry.models),
    }


def _text(plan: dict[str, Any]) -> str:
    lines = [
        f"{plan['gpu']}: {plan['device']}, engine {plan['engine']} ({plan['mode']} mode)",
        f"fallback: {', then '.join(plan['fallback'])}; stock: {plan['stock']}",
        f"deployable: {', '.join(plan['deployable'])}",
        f"registered here: {', '.join(plan['installed']) or 'none of them'}",
        *(
            [f"timed: {', '.join(plan['timed']) or 'none of them'}"]
            if plan["timed"] != plan["deployable"]
            else []
        ),
        f"{plan['cells']} cells in {plan['columns']} columns, {plan['too_large']} too large for the device"
        + (f"; picked of {plan['picked_of']} and decided as among them" if plan["picked_of"] else ""),
        f"estimated: {_took(plan['estimated_seconds'])} beside the self-test"
        + (", at least: one candidate a cell" if plan["strategy"] == "adaptive" else ""),
        _again(plan["second_timings"]),
    ]
    if plan["cells_within_budget"] is not None:
        lines.append(
            f"adaptive: about {plan['cells_within_budget']} cells in {plan['budget_seconds']:.0f} s, "
            "those that gain most for their time"
        )
    for entry in plan["entries"]:
        dtypes = entry["dtypes"]
        lines.append(
            f"  {entry['heads']} page {entry['page_size']} {dtypes['q']}/{dtypes['kv']}/{dtypes['out']} "
            f"q_len {entry['q_len']}: batch {_list(entry['batch_size'])}, kv {_list(entry['kv_len'])}"
            + (f", eager {entry['eager']}" if entry["eager"] else "")
            + f"  [{'; '.join(entry['models'])}]"
        )
    return "\n".join(lines)


def _took(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _again(found: dict[str, Any]) -> str:
    sampled = f"{_took(found['seconds'])} to time {found['cells']} cells again in other processes (tau)"
    if not found["cells"]:
        return "second timings: none, too few cells"
    return f"of these: {sampled}; each near claim adds up to {found['near_claim_seconds_at_most']:.1f} s"


def _list(values: list[int]) -> str:
    return ", ".join(str(value) for value in values)
