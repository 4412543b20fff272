"""``graph_replay`` without a GPU: a graph is emulated by what a capture freezes, the host's values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from autotune.checks import registry
from autotune.checks.controls import COLUMN
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.domain.verdict import CheckStatus, FailureKind
from autotune.routes.base import Step
from autotune.routes.planted import CleanSession, Planted

CHECK = registry.get("graph_replay")


class FromDevice(CleanSession):
    """Reads the lengths where a kernel would, in ``run``; planted ones on the CPU do in ``prepare``."""

    def run(self, out: torch.Tensor) -> None:
        self.lens = self.step.seq_lens.tolist()
        super().run(out)


class Baked(CleanSession):
    """Keeps the lengths of its capture."""


class Refusing(CleanSession):
    """Waits for the device inside ``run``."""

    capturing = False

    def run(self, out: torch.Tensor) -> None:
        if Refusing.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        super().run(out)


class Opening(Planted):
    """Opens a session class of this test."""

    session: type[CleanSession]

    def open(self, capacity: Any, allocate: Any) -> CleanSession:
        session = self.session(capacity, allocate)
        opened.append(session)
        return session


opened: list[CleanSession] = []


class FakeGraph:
    """Replays ``run`` of a copy made at capture: tensors are the same, host values those of then."""

    frozen: Any = None

    def replay(self) -> None:
        session, out = self.frozen
        session.run(out)

    def reset(self) -> None:
        self.frozen = None


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def capture(graph: FakeGraph, capture_error_mode: str) -> Iterator[None]:
        session = opened[-1]
        plain = session.run

        def run(out: torch.Tensor) -> None:
            frozen = copy.copy(session)
            frozen.__dict__.pop("run", None)
            graph.frozen = (frozen, out)
            plain(out)

        session.run = run  # type: ignore[method-assign]
        Refusing.capturing = True
        try:
            yield
        finally:
            Refusing.capturing = False
            session.run = plain  # type: ignore[method-assign]

    opened.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)


def route(session: type[CleanSession]) -> Planted:
    made = Opening("planted-clean")
    object.__setattr__(made, "session", session)
    return made


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
@pytest.mark.parametrize("pad_value", [1, 4])
def test_a_kernel_that_reads_its_lengths_passes(batch_size: int, pad_value: int, make_trial: Any) -> None:
    column = Column(Shape(4, 2, 64, 16), PROFILES["bf16"], 3, batch_size, 512)
    row = CHECK.run(make_trial(route(FromDevice), column, pad_value=pad_value))
    assert row.status is CheckStatus.PASSED, row.detail
    # a warm-up, then each replay and its eager twin, in both placements
    steps = 3 + len({max(1, batch_size // 2), 1} - {batch_size})
    assert row.launches == 2 * (1 + 2 * steps)


def test_lengths_kept_from_the_capture_are_found(make_trial: Any) -> None:
    row = CHECK.run(make_trial(route(Baked), COLUMN))
    assert (row.status, row.kind) == (CheckStatus.FAILED, FailureKind.WRONG_OUTPUT)
    assert "replay, other short rows" in row.detail


def test_a_capture_that_is_refused_is_a_launch_error(make_trial: Any) -> None:
    row = CHECK.run(make_trial(route(Refusing), COLUMN))
    assert (row.status, row.kind) == (CheckStatus.FAILED, FailureKind.LAUNCH_ERROR)
    assert row.detail.startswith("cannot be captured: CUDA error: operation not permitted")


def test_every_replay_is_prepared_at_the_captured_addresses(make_trial: Any) -> None:
    seen: list[tuple[int, ...]] = []

    class Watching(FromDevice):
        def prepare(self, step: Step) -> None:
            tensors = (step.q, step.k, step.v, step.page_table, step.seq_lens)
            seen.append(tuple(tensor.data_ptr() for tensor in tensors))
            super().prepare(step)

    assert CHECK.run(make_trial(route(Watching), COLUMN)).status is CheckStatus.PASSED
    assert len(set(seen)) == 2  # one set of addresses a placement


def test_it_says_when_it_says_nothing(make_trial: Any) -> None:
    assert CHECK.applies(make_trial(route(FromDevice))) == "the CPU has no graphs"
