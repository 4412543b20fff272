"""What a route does with q, K and V before ``run``, with copies of them, or only in another mode of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune.arena.contents import bits
from autotune.arena.host_mmap import HostMmapArena
from autotune.arena.operands import QueryStride, Recipe, build
from autotune.arena.plain import PlainArena
from autotune.bench.clock import Launch
from autotune.checks import oracle, registry
from autotune.checks.contents import Withheld, live_pages, renew
from autotune.checks.controls import COLUMN, CPU, ONE_KV_HEAD, controls_count
from autotune.checks.strides import _make_odd
from autotune.domain.cell import Column
from autotune.domain.verdict import CheckStatus, FailureKind
from autotune.routes.base import Step
from autotune.routes.planted import CleanSession, Planted

COLUMNS = [COLUMN, ONE_KV_HEAD, CPU.scaled]


class Opening(Planted):
    """Opens a session class of this test."""

    session: type[CleanSession]

    def open(self, capacity: Any, allocate: Any) -> CleanSession:
        return self.session(capacity, allocate)


def route(session: type[CleanSession]) -> Planted:
    made = Opening("planted-clean")
    object.__setattr__(made, "session", session)
    return made


class CopiesInPrepare(CleanSession):
    """Copies what it will need, one launch early."""

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        self.copies = {name: getattr(step, name).clone() for name in ("q", "k", "v")}

    def run(self, out: torch.Tensor) -> None:
        for name, copy in self.copies.items():
            setattr(self.step, name, copy)
        super().run(out)


class WritesInPrepare(CleanSession):
    """Uses a page of V as scratch while it prepares."""

    def prepare(self, step: Step) -> None:
        super().prepare(step)
        step.v[self.page_ids(0, 1), -1] = 0.0


@pytest.mark.parametrize("name", [n for n in registry.runs(COLUMN, "cpu") if n not in ("nan_pool", "scales")])
def test_no_check_takes_work_on_operands_that_are_not_there_yet(name: str, make_trial: Any) -> None:
    row = registry.get(name).run(make_trial(route(CopiesInPrepare)))
    assert (row.status, row.kind) == (CheckStatus.FAILED, FailureKind.NAN_LEAK), row.detail


def test_inputs_written_by_prepare_are_named(make_trial: Any) -> None:
    row = registry.get("reference").run(make_trial(route(WritesInPrepare)))
    assert (row.status, row.kind) == (CheckStatus.FAILED, FailureKind.OUT_OF_BOUNDS_WRITE)
    assert "the input v was overwritten by prepare" in row.detail


def test_routes_are_proven_in_the_mode_in_which_they_are_timed(make_trial: Any) -> None:
    seen: set[bool] = set()

    class Watching(CleanSession):
        def __init__(self, *args: Any) -> None:
            seen.add(torch.is_inference_mode_enabled())
            super().__init__(*args)

        def prepare(self, step: Step) -> None:
            seen.add(torch.is_inference_mode_enabled())
            super().prepare(step)

        def run(self, out: torch.Tensor) -> None:
            seen.add(torch.is_inference_mode_enabled())
            super().run(out)

    assert registry.get("stale_state").run(make_trial(route(Watching))).status is CheckStatus.PASSED
    assert seen == {True}


@pytest.mark.parametrize("column", COLUMNS, ids=str)
@pytest.mark.parametrize("stride", list(QueryStride))
def test_what_was_withheld_is_back_bit_by_bit(column: Column, stride: QueryStride) -> None:
    with PlainArena() as arena:
        operands = build(arena, column, Recipe((3, 17, 40), seed=1, query_stride=stride), "cpu")
        if column.shape.num_kv_heads == 1:
            _make_odd(operands)
        step, live = operands.step, live_pages(operands)
        before = [bits(tensor).clone() for tensor in (step.q, step.k, step.v)]
        withheld = Withheld(operands)
        assert bool(torch.isnan(step.q.float()).all())
        dead = sorted(set(range(step.k.shape[0])) - set(live.tolist()))
        for cache, held in ((step.k, before[1]), (step.v, before[2])):
            assert bool(torch.isnan(cache.float()[live]).all())
            assert torch.equal(bits(cache)[dead], held[dead])
        withheld.restore()
        assert withheld.overwritten() == []
        after = [bits(tensor) for tensor in (step.q, step.k, step.v)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("column", COLUMNS, ids=str)
@pytest.mark.parametrize("kept", ["q", "k", "v"])
def test_an_old_copy_of_any_operand_gives_another_result(kept: str, column: Column) -> None:
    with PlainArena() as arena:
        operands = build(arena, column, Recipe((30, 17, 40), seed=1), "cpu")
        old = bits(getattr(operands.step, kept)).clone()
        metadata = (operands.step.page_table.clone(), operands.step.seq_lens.clone())
        renew(operands)
        new = oracle.reference(operands)
        bits(getattr(operands.step, kept)).copy_(old)
        assert oracle.worst(oracle.reference(operands), new).error > 10 * oracle.bound(column)
        assert torch.equal(metadata[0], operands.step.page_table)
        assert torch.equal(metadata[1], operands.step.seq_lens)


def test_operands_can_be_printed_after_their_memory_is_gone() -> None:
    with HostMmapArena() as arena:
        operands = build(arena, COLUMN, Recipe((3, 17, 40), seed=1), "cpu")
        launch = Launch(operands.step, operands.out)
    for gone in (operands, operands.step, launch):
        assert "(9, 4, 64)" in repr(gone) and "tensor" not in repr(gone)


def test_how_many_controls_a_device_has() -> None:
    assert controls_count("cpu") == controls_count() > 30
    assert controls_count("cuda:1") == controls_count("cuda") > 30
