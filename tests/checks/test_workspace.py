"""How much of a workspace is used: found by pattern, shown by a run with exactly that much."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from autotune.checks import registry
from autotune.checks.base import Trial
from autotune.checks.controls import COLUMN
from autotune.domain.verdict import CheckStatus, FailureKind
from autotune.routes.base import Allocate, Capacity
from autotune.routes.planted import CleanSession, Planted

MakeTrial = Callable[..., Trial]
CHECK = registry.get("workspace")
ASKED = 1 << 20


class Uses(CleanSession):
    """Writes the first ``used`` bytes of a workspace of 1 MiB."""

    used = 1000

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        super().__init__(capacity, allocate)
        self.scratch = allocate("workspace", (ASKED,), torch.uint8)

    def run(self, out: torch.Tensor) -> None:
        self.scratch[: self.used].zero_()
        super().run(out)


class Refuses(Uses):
    """Its library wants more than it writes."""

    def run(self, out: torch.Tensor) -> None:
        if self.scratch.numel() < 4096:
            raise RuntimeError("workspace too small")
        super().run(out)


class RefusesToOpen(Uses):
    """As above, when opened."""

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        super().__init__(capacity, allocate)
        if self.scratch.numel() < 4096:
            raise RuntimeError("workspace too small")


class Zeroes(Uses):
    """Zeroes all of it first: what it writes later cannot be told apart."""

    def __init__(self, capacity: Capacity, allocate: Allocate) -> None:
        super().__init__(capacity, allocate)
        self.scratch.zero_()


class ReadsAhead(Uses):
    """Reads beyond what it writes."""

    def run(self, out: torch.Tensor) -> None:
        super().run(out)
        assert ctypes.c_ubyte.from_address(self.scratch.data_ptr() + 8191).value >= 0


@dataclass(frozen=True)
class Under(Planted):
    """A session of the test's own."""

    session: type[CleanSession] = CleanSession

    def open(self, capacity: Capacity, allocate: Allocate) -> CleanSession:
        return self.session(capacity, allocate)


@pytest.mark.parametrize(
    ("session", "limit"),
    [
        (Uses, f"1000 of {ASKED} workspace bytes written, and 1024 suffice"),
        (Refuses, f"1000 of {ASKED} workspace bytes written, but 1024 are too few: workspace/tail: work"),
        (
            RefusesToOpen,
            f"1000 of {ASKED} workspace bytes written, but 1024 are too few: workspace/tail: open",
        ),
        (Zeroes, f"all of {ASKED} workspace bytes are written"),
        (CleanSession, "no workspace"),
    ],
)
def test_what_it_says(session: type[CleanSession], limit: str, make_trial: MakeTrial) -> None:
    row = CHECK.run(make_trial(Under("planted-clean", session=session)))
    assert row.status is CheckStatus.PASSED, row.detail
    assert len(row.limits) == 1 and row.limits[0].startswith(limit), row.limits


def test_a_read_past_the_mark_faults(make_trial: MakeTrial, run_forked: Callable[..., object]) -> None:
    trial = make_trial(Under("planted-clean", session=ReadsAhead))
    assert run_forked("workspace", trial) is FailureKind.ILLEGAL_ACCESS


def test_it_is_no_part_of_a_proof() -> None:
    assert "workspace" not in registry.runs(COLUMN, "cuda")
