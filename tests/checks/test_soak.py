"""Random workloads: a right kernel passes under any seed, a wrong one is found; run by name only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autotune.checks import registry
from autotune.checks.base import Trial
from autotune.checks.controls import COLUMN, CPU
from autotune.checks.soak import LAUNCHES
from autotune.domain.verdict import CheckStatus, FailureKind
from autotune.routes.planted import Planted

MakeTrial = Callable[..., Trial]
SOAK = registry.get("soak")


@pytest.mark.parametrize("column", [COLUMN, CPU.scaled], ids=["bf16", "fp8"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_right_kernel_passes(seed: int, column: object, make_trial: MakeTrial) -> None:
    row = SOAK.run(make_trial(Planted("planted-clean"), column, (65, 300), seed=seed))
    assert (row.status, row.launches, row.placements) == (CheckStatus.PASSED, 2 * LAUNCHES, ("tail", "head"))


@pytest.mark.parametrize(
    ("route", "kind"),
    [
        ("planted-scale-dropped", FailureKind.WRONG_OUTPUT),
        ("planted-query-stride", FailureKind.WRONG_OUTPUT),
        ("planted-unwritten-tail", FailureKind.UNWRITTEN_OUTPUT),
        ("planted-consecutive-pages", FailureKind.WRONG_OUTPUT),
    ],
)
def test_a_wrong_one_is_found(route: str, kind: FailureKind, make_trial: MakeTrial) -> None:
    row = SOAK.run(make_trial(Planted(route), kv_lens=(65, 300)))
    assert (row.status, row.kind) == (CheckStatus.FAILED, kind)
    assert "soak/tail: soak " in row.detail


def test_lengths_stay_in_the_cell(make_trial: MakeTrial) -> None:
    seen: list[str] = []
    trial = make_trial(Planted("planted-clean"), kv_lens=(129, 256), launched=seen.append)
    assert SOAK.run(trial).status is CheckStatus.PASSED
    longest = [
        max(int(n) for n in text.rpartition("kv_lens ")[2].split(",")) for text in seen if "kv_lens" in text
    ]
    assert len(longest) == 2 * LAUNCHES and len(set(longest)) > 3
    assert all(129 <= n <= 256 for n in longest)


def test_it_is_no_part_of_a_proof() -> None:
    with pytest.raises(registry.UnknownCheckError, match="run by name only: soak and workspace"):
        registry.get("soaking")
    assert "soak" not in registry.names() and "soak" not in registry.runs(COLUMN, "cuda")
