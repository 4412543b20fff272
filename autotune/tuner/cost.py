"""How long a cell will take: for ``plan``, the progress bar's first guess, and the cheapest-first order.

A prediction never decides anything but order: it is good to a factor of about two, and needs no more.

    call      = overhead + per_row x batch + bytes(KV) / bandwidth + products x per_product
    proof     = routes x (base + launches' share of the largest KV)       once a column
    timing    = open + operand sets + (start-up + typical rounds) x routes x max(group, call)   once a cell
    again     = children + the same with the sample's rounds   for tau, up to 24 cells of the mean timing

``products`` counts multiply-adds: batch x q_len x query heads x kv_len x (head_dim + head_dim_vo).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from autotune.bench.record import MIN_GROUP_MS, RoundSettings
from autotune.domain.dtypes import BITS, Dtype
from autotune.tuner.sample import CELLS_A_CHILD, ROUNDS_OF, due
from autotune.tuner.standing import AGREE_ROUNDS

if TYPE_CHECKING:
    from autotune.domain.cell import Cell, Column
    from autotune.space.grid import SpaceCell


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per unit of work on one kind of device.

    Attributes:
        call: of one launch, whatever its size.
        call_row: per request of the batch.
        call_byte: per byte of KV read.
        call_product: per multiply-add.
        proof: of all checks of one route in a column, whatever its size.
        proof_byte, proof_product: per byte of KV and per product at the column's longest length; they sum
            over all launches of all checks, operands and references included.
        open: of sessions and whatever else one cell's timing starts with.
        build_byte: per byte of KV pool filled.
        child: of a fresh child, until it can time a cell.
        rounds: of a typical decision, past the start-up.
    """

    call: float
    call_row: float
    call_byte: float
    call_product: float
    proof: float
    proof_byte: float
    proof_product: float
    open: float
    build_byte: float
    child: float
    rounds: int = 20


COEFFICIENTS = {
    # Least squares of relative errors over 54 cells (8/1/128, page 16, fp32 and bf16, q_len 1-8, batch 1-16,
    # kv 256-4096) and 12 columns' proofs, both torch routes, one thread of a 2-core Xeon virtual machine
    # that was also doing other work; calls include ``prepare``.
    "cpu": Coefficients(
        call=50e-6,
        call_row=50e-6,
        call_byte=0.3e-9,
        call_product=16e-12,
        proof=0.55,
        proof_byte=21e-9,
        proof_product=2e-9,
        open=0.02,
        build_byte=2e-9,
        child=0.015,
    ),
    # ESTIMATES from runs on one H200, not a fit: 3 TB/s and 10 microseconds a launch (XQA and FA2, head_dim
    # 128); 65 launches with their references a second, taken for 70 launches a proof as on the CPU; graph
    # capture and opening 0.15 s a route. Building a library's modules is not counted.
    "cuda": Coefficients(
        call=10e-6,
        call_row=0.0,
        call_byte=1 / 3e12,
        call_product=0.0,
        proof=1.1,
        proof_byte=0.0,
        proof_product=0.0,
        open=0.3,
        build_byte=1 / 2e10,
        child=3.0,
    ),
}


def predict(cell: Cell, device: str, routes: int = 2) -> float:
    """Seconds that timing ``cell`` takes, its column being proven: ``routes`` live ones, one cell.

    Raises:
        ValueError: no coefficients for this kind of device.
    """
    return _timing(cell, device, routes, _coefficients(device).rounds)


def _timing(cell: Cell, device: str, routes: int, rounds: int) -> float:
    use = _coefficients(device)
    settings = RoundSettings()
    work = call_seconds(cell, device)
    one_round = routes * max(MIN_GROUP_MS[device.partition(":")[0]] / 1e3, work)
    start_up = max(settings.discard_rounds * one_round, settings.discard_ms / 1e3)
    pools = settings.operand_sets * _kv_bytes(cell.column, cell.kv_high) * use.build_byte
    return use.open + pools + start_up + rounds * one_round


@dataclass(frozen=True, slots=True)
class SecondTimings:
    """What timing cells again in fresh children takes.

    Attributes:
        cells, seconds: of the sample that tau is measured on.
        near: seconds that a near claim's second process adds, at most; how many there are is open.
    """

    cells: int
    seconds: float
    near: float


def predict_again(cells: Iterable[Cell], device: str, routes: int = 2, *, last: bool = True) -> SecondTimings:
    """The second timings of a study of ``cells``, each at the mean of all: the sample takes them evenly.

    Args:
        last: all cells are timed; False: these many are, and others are left.

    Raises:
        ValueError: no coefficients for this kind of device.
    """
    cells = list(cells)
    kind, child = device.partition(":")[0], _coefficients(device).child
    if not cells:
        return SecondTimings(0, 0.0, 0.0)
    count = due(len(cells), last=last)
    sampled = sum(_timing(cell, device, routes, ROUNDS_OF[kind]) for cell in cells) / len(cells)
    near = sum(_timing(cell, device, 2, AGREE_ROUNDS) for cell in cells) / len(cells)
    return SecondTimings(count, count * sampled + ceil(count / CELLS_A_CHILD[kind]) * child, child + near)


def predict_look(cell: Cell, device: str, settings: RoundSettings, routes: int) -> float:
    """Seconds of ``settings.max_rounds`` rounds of ``routes`` routes that serve the search only.

    Raises:
        ValueError: no coefficients for this kind of device.
    """
    use = _coefficients(device)
    one_round = routes * max(settings.min_group_ms / 1e3, call_seconds(cell, device))
    pools = settings.operand_sets * _kv_bytes(cell.column, cell.kv_high) * use.build_byte
    start_up = max(settings.discard_rounds * one_round, settings.discard_ms / 1e3)
    return use.open + pools + start_up + settings.max_rounds * one_round


def predict_proof(column: Column, device: str, routes: int = 2) -> float:
    """Seconds that all checks of ``routes`` routes take in ``column``, lengths up to its max context.

    Raises:
        ValueError: no coefficients for this kind of device.
    """
    use = _coefficients(device)
    longest = column.max_context
    return routes * (
        use.proof
        + use.proof_byte * _kv_bytes(column, longest)
        + use.proof_product * _products(column, longest)
    )


def ranked(cells: Iterable[SpaceCell], device: str) -> list[SpaceCell]:
    """Cheapest column first, a column's cells together, shortest first.

    A budget that ends early then leaves whole columns open, not the long rows of all of them: an engine that
    captures graphs asks for the ``any`` row, which needs every row of its column.
    """
    listed = list(cells)
    cost: dict[Column, float] = {}
    for item in listed:
        column = item.cell.column
        cost[column] = cost.get(column, predict_proof(column, device)) + predict(item.cell, device)
    return sorted(listed, key=lambda item: (cost[item.cell.column], item.cell.column.id, item.cell.kv_high))


def predict_all(cells: Iterable[Cell], device: str, routes: int = 2) -> float:
    """Seconds for all ``cells``: each column proven once, each cell timed."""
    cells = list(cells)
    columns = {cell.column.id: cell.column for cell in cells}
    return sum(predict_proof(column, device, routes) for column in columns.values()) + sum(
        predict(cell, device, routes) for cell in cells
    )


def best_shares(cells: Sequence[tuple[float, float]], shared_s: float) -> tuple[float, int]:
    """Which of a column's cells are worth its proof together.

    Args:
        cells: (gain, seconds) each, most gain a second first.
        shared_s: paid once, whichever are taken.

    Returns:
        The most gain a second that any first n of them reach, and n.
    """
    best, count, gained, spent = -1.0, 0, 0.0, shared_s
    for number, (gain, seconds) in enumerate(cells, 1):
        gained, spent = gained + gain, spent + seconds
        if (rate := gained / max(spent, 1e-9)) > best:
            best, count = rate, number
    return best, count


def within(
    cells: Iterable[Cell], device: str, budget_s: float, weights: Mapping[str, float] | None = None
) -> int:
    """Cells that an adaptive run would settle in ``budget_s`` seconds, if each gained alike and its first
    candidate won: a fallback and one candidate proven in a column, both timed. A first guess; what a run
    learns changes its order.

    Args:
        weights: of cells by id; one that is not there has no traffic and is not counted. None: 1 each.
    """
    columns: dict[Column, list[tuple[float, float]]] = {}
    for cell in cells:
        weight = 1.0 if weights is None else weights.get(cell.id, 0.0)
        if weight > 0:
            columns.setdefault(cell.column, []).append((weight, predict(cell, device)))
    parts: list[tuple[float, list[float]]] = []
    for column, pairs in columns.items():
        pairs.sort(key=lambda pair: -pair[0] / pair[1])
        proof = predict_proof(column, device)
        while pairs:
            rate, count = best_shares(pairs, proof)
            parts.append((rate, [proof + pairs[0][1], *(seconds for _, seconds in pairs[1:count])]))
            pairs, proof = pairs[count:], 0.0
    spent, settled = 0.0, 0
    for _, seconds in sorted(parts, key=lambda part: -part[0]):
        for each in seconds:
            spent += each
            if spent > budget_s:
                return settled
            settled += 1
    return settled


def call_seconds(cell: Cell, device: str) -> float:
    """Seconds of one call at the upper end of the cell's KV row, the larger of what its rounds draw.

    Raises:
        ValueError: no coefficients for this kind of device.
    """
    use = _coefficients(device)
    column = cell.column
    return (
        use.call
        + use.call_row * column.batch_size
        + use.call_byte * _kv_bytes(column, cell.kv_high)
        + use.call_product * _products(column, cell.kv_high)
    )


def _coefficients(device: str) -> Coefficients:
    kind = device.partition(":")[0]
    if kind not in COEFFICIENTS:
        raise ValueError(f"no cost model for device {device!r}; there is one for: {', '.join(COEFFICIENTS)}")
    return COEFFICIENTS[kind]


def seen_tokens(column: Column, kv_len: int) -> int:
    """Tokens that a query can see at a length: a window bounds the work, not the pool."""
    window = column.shape.window_left
    return kv_len if window < 0 else min(kv_len, window + column.q_len)


def _kv_bytes(column: Column, kv_len: int) -> float:
    shape = column.shape
    elements = shape.num_kv_heads * (shape.head_dim + shape.head_dim_vo)
    return column.batch_size * seen_tokens(column, kv_len) * elements * BITS[Dtype(column.dtypes.kv)] / 8


def _products(column: Column, kv_len: int) -> float:
    shape = column.shape
    dims = shape.head_dim + shape.head_dim_vo
    return float(column.batch_size * column.q_len * shape.num_qo_heads * seen_tokens(column, kv_len) * dims)
