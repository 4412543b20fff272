"""Large logits: what a kernel cannot do is stated as a limit, what it must do is a finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from autotune.arena.operands import Recipe, build
from autotune.arena.plain import PlainArena
from autotune.checks import oracle, registry
from autotune.checks.base import Trial
from autotune.checks.controls import COLUMN
from autotune.checks.extreme_logits import MAGNITUDES, Aligned, allowance, query_value
from autotune.domain.dtypes import PROFILES
from autotune.domain.verdict import CheckStatus, FailureKind
from autotune.routes.base import Allocate, Capacity
from autotune.routes.planted import CleanSession, Planted

MakeTrial = Callable[..., Trial]
CHECK = registry.get("extreme_logits")


@dataclass(frozen=True)
class Under(Planted):
    """A session of the test's own."""

    session: type[CleanSession] = CleanSession

    def open(self, capacity: Capacity, allocate: Allocate) -> CleanSession:
        return self.session(capacity, allocate)


class HalfPrecision(CleanSession):
    """Logits pass through fp16."""

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        return super().weights(logits.to(torch.float16).float())


def test_a_right_kernel_has_no_limits(make_trial: MakeTrial) -> None:
    row = CHECK.run(make_trial(Planted("planted-clean")))
    assert (row.status, row.limits, row.placements) == (CheckStatus.PASSED, (), ("tail", "head"))
    assert row.launches == 2 * 4 * 2  # placements, signs and contents, ordinary and largest
    assert row.worst_error is None  # what it errs by out there is not its accuracy


@pytest.mark.parametrize("profile", ["fp32", "fp8"])
def test_other_dtypes(profile: str, make_trial: MakeTrial) -> None:
    row = CHECK.run(make_trial(Planted("planted-clean"), replace(COLUMN, dtypes=PROFILES[profile])))
    assert (row.status, row.limits) == (CheckStatus.PASSED, ())


def test_a_finite_minus_infinity_is_a_limit_on_one_side(make_trial: MakeTrial) -> None:
    row = CHECK.run(make_trial(Planted("planted-finite-infinity")))
    assert row.status is CheckStatus.PASSED
    # -5e4: what was right is stated, not the first magnitude that was wrong
    assert row.limits == ("negative logits up to 40000 in magnitude",)


def test_fp16_logits_are_a_limit_on_both_sides(make_trial: MakeTrial) -> None:
    row = CHECK.run(make_trial(Under("planted-clean", session=HalfPrecision)))
    assert row.status is CheckStatus.PASSED
    assert set(row.limits) == {f"{sign} logits up to 40000 in magnitude" for sign in ("negative", "positive")}


def test_ordinary_logits_must_be_right(make_trial: MakeTrial) -> None:
    row = CHECK.run(make_trial(Planted("planted-no-maximum")))
    assert (row.status, row.kind) == (CheckStatus.FAILED, FailureKind.NAN_LEAK)
    assert "logits of 100, alike" in row.detail


def test_a_query_dtype_that_ends_early_says_how_far_it_was_tried(make_trial: MakeTrial) -> None:
    column = replace(COLUMN, dtypes=replace(COLUMN.dtypes, q="fp16"))
    row = CHECK.run(make_trial(Planted("planted-clean"), column))
    assert row.status is CheckStatus.PASSED and row.limits == ()
    narrow = replace(COLUMN, dtypes=replace(COLUMN.dtypes, q="e4m3", kv="e4m3"))
    row = CHECK.run(make_trial(Planted("planted-clean"), narrow))
    assert row.status is CheckStatus.PASSED
    assert row.limits == tuple(
        f"{sign} logits tested up to 1000, where the query's dtype ends" for sign in ("negative", "positive")
    )


def test_a_soft_cap_leaves_nothing_to_try(make_trial: MakeTrial) -> None:
    capped = replace(COLUMN, shape=replace(COLUMN.shape, soft_cap=30.0))
    assert "soft cap" in (CHECK.applies(make_trial(Planted("planted-clean"), capped)) or "")


def test_the_allowance_hides_nothing() -> None:
    assert max(allowance(magnitude) for magnitude in MAGNITUDES) < 0.1


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_every_type_holds_the_query_exactly(head_dim: int, make_trial: MakeTrial) -> None:
    shape = replace(COLUMN.shape, head_dim=head_dim, head_dim_vo=head_dim)
    for magnitude in MAGNITUDES:
        value = query_value(make_trial(Planted("planted-clean"), replace(COLUMN, shape=shape)), magnitude)
        assert value is not None
        assert magnitude <= value * head_dim**0.5 <= 1.125 * magnitude
        assert float(torch.tensor(value).to(torch.bfloat16)) == value
        while value > 448.0:  # more than e4m3 reaches: its bits are looked at further down
            value /= 2.0
        assert float(torch.tensor(value).to(torch.float8_e4m3fn)) == value


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sinks_go_with_the_logits(head_dim: int, sign: int, make_trial: MakeTrial) -> None:
    shape = replace(COLUMN.shape, head_dim=head_dim, head_dim_vo=head_dim, sinks=True)
    column = replace(COLUMN, shape=shape)
    trial = make_trial(Planted("planted-clean"), column)
    with PlainArena("cpu") as arena:
        operands = build(arena, column, Recipe((20, 9, 33), seed=3), "cpu")
        aligned = Aligned(operands)
        aligned.write_keys(spread=False)
        for magnitude in MAGNITUDES:
            value = query_value(trial, magnitude)
            assert value is not None
            aligned.write_queries(sign * value)
            ref = oracle.reference(operands)
            bare = replace(operands, step=replace(operands.step, sinks=None))
            share = ref.norm(dim=-1) / oracle.reference(bare).norm(dim=-1)
            low, high = float(share.min()), float(share.max())
            assert 0.05 < low <= high < 0.99, magnitude


def test_a_proof_is_complete_without_it() -> None:
    assert "extreme_logits" not in registry.expected(COLUMN, "cpu")
    assert "extreme_logits" in registry.runs(COLUMN, "cpu")
