"""``graph_replay``: captured once, replayed with other lengths, tables, queries, and a smaller live batch.

A graph keeps addresses and host values of its capture. An engine captures with every row padded, writes new
operands to the same addresses, lets the route prepare, and replays. So does this check, in one placement with
the engine's pad value everywhere, in the other with ordinary lengths; each replay is judged against the
reference and against an eager launch of the same operands in the same session.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from autotune.arena import cuda_allocator
from autotune.arena.base import Placement
from autotune.arena.contents import bits
from autotune.arena.operands import Operands, Recipe, build
from autotune.arena.plain import PlainArena
from autotune.checks import lengths, oracle
from autotune.checks.blame import FindingError, calling
from autotune.checks.catalogue import VERSIONS
from autotune.checks.contents import Withheld, renew
from autotune.checks.launch import Opened, Stage, conduct
from autotune.checks.padded_rows import pad
from autotune.domain.verdict import FailureKind
from autotune.routes.base import Capture

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult


class GraphReplay:
    """One capture, then replays: short rows, other contents, a long row, half the batch live, one row."""

    name = "graph_replay"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Only on a device with graphs, to a route that may be captured."""
        if trial.device == "cpu":
            return "the CPU has no graphs"
        if trial.route.capture is Capture.NO:
            return "the route may not be captured: an engine calls it eagerly only"
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        trial, size = stage.trial, stage.trial.column.batch_size
        rng = random.Random(stage.seed(0))
        long = lengths.ends_in(trial, stage.placement, rng)[-1]
        padding = max(1, trial.pad_value)
        padded_capture = stage.placement is Placement.TAIL
        first = [padding] * size if padded_capture else lengths.short(trial, rng, size)
        steps = [
            ("other short rows", lengths.short(trial, rng, size), size),
            ("a long row", [*lengths.short(trial, rng, size - 1), long], size),
        ]
        for live in sorted({max(1, size // 2), 1} - {size}, reverse=True):
            rows = [*lengths.short(trial, rng, live), *[padding] * (size - live)]
            steps.append((f"{live} of {size} rows live", rows, live))
        recipes = stage.one_pool(
            [
                Recipe(tuple(kv_lens), seed=stage.seed(index + 1))
                for index, kv_lens in enumerate([first, *(kv_lens for _, kv_lens, _ in steps)])
            ]
        )
        with ExitStack() as stack:
            stack.enter_context(cuda_allocator.holding())
            opened = stack.enter_context(stage.opened(recipes[0]))
            operands = opened.build(recipes[0])
            if padded_capture:
                pad(operands, 0, trial.pad_value)
            graph = _capture(stage, opened, operands)
            for index, ((label, _, live), recipe) in enumerate(zip(steps, recipes[1:], strict=True)):
                with PlainArena(trial.device) as arena:
                    fresh = build(arena, trial.column, stage.as_stored(recipe), trial.device)
                    if live < size:
                        pad(fresh, live, trial.pad_value)
                    step = _transplant(fresh, operands)
                _replay(opened, step, graph, label, live)
                if index == 0:  # as the next layer: nothing but q, K and V has changed
                    renew(step)
                    _replay(opened, step, graph, "the same rows with other contents", live)
            graph.reset()


def _capture(stage: Stage, opened: Opened, operands: Operands) -> torch.cuda.CUDAGraph:
    """Run once eagerly, as an engine warms up, then capture.

    Raises:
        FindingError: the route cannot be captured, though it says that it can.
    """
    opened.fire(operands, "warm-up before capture")
    graph = torch.cuda.CUDAGraph()
    text = stage.describe("capture", operands.recipe.kv_lens)
    try:
        withheld = Withheld(operands)
        with calling(stage.trial, text):
            try:
                opened.session.prepare(operands.step)
            finally:
                withheld.restore()
            with torch.cuda.graph(graph, capture_error_mode="relaxed"):
                opened.session.run(operands.out)
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        message = " ".join(str(error).split())[:300]
        raise FindingError(FailureKind.LAUNCH_ERROR, f"cannot be captured: {message} ({text})") from error
    return graph


def _transplant(fresh: Operands, into: Operands) -> Operands:
    """``fresh``'s contents at the captured addresses, which is where an engine would have written them."""
    new, old = fresh.step, into.step
    for source, target in (
        (new.q, old.q),
        (new.k, old.k),
        (new.v, old.v),
        (new.page_table, old.page_table),
        (new.seq_lens, old.seq_lens),
        *zip(new.kv_block_scales or (), old.kv_block_scales or (), strict=True),
        *([(new.sinks, old.sinks)] if new.sinks is not None and old.sinks is not None else []),
    ):
        bits(target).copy_(bits(source))
    step = replace(old, host_kv_lens=None if old.host_kv_lens is None else new.host_kv_lens)
    return replace(fresh, step=step, out=into.out)


def _replay(opened: Opened, operands: Operands, graph: torch.cuda.CUDAGraph, label: str, live: int) -> None:
    ref = oracle.reference(operands)
    rows = range(live)
    opened.fire(operands, f"replay, {label}", run=graph.replay)
    opened.judge(operands, f"replay, {label}", ref, live=rows)
    replayed = operands.out[: live * operands.column.q_len].clone()
    opened.fire(operands, f"eager, {label}")
    opened.judge(operands, f"eager, {label}", ref, live=rows)
    eager = operands.out[: live * operands.column.q_len].to(torch.float64)
    found, bound = oracle.worst(replayed, eager), opened.stage.bound
    if found.error > bound:
        where = opened.stage.place(operands, found.row, found.head)
        text = opened.stage.describe(f"replay, {label}", operands.recipe.kv_lens)
        raise FindingError(
            FailureKind.WRONG_OUTPUT,
            f"replay and eager differ by {found.error:.3g} > bound {bound:.3g} at {where} ({text})",
        )
