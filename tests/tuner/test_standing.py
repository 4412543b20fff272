"""How candidates stand: the test of each, the rounds that it has ahead, and who beats whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.bench.eprocess import SignTest, State
from autotune.bench.objective import graph
from autotune.domain.decision import Reason
from autotune.domain.verdict import FailureKind, Status, Verdict
from autotune.tuner.decide import decide, plan_next
from autotune.tuner.standing import (
    Candidate,
    Question,
    beaten,
    contestable,
    disturbed,
    most_left,
    rounds_left,
    standings_of,
    unbeaten,
)
from tests.tuner.paired import FAST, SAFE, TEST, evidence, rounds_of

UNSAFE = Candidate("bad", Verdict(Status.UNSAFE, FailureKind.ILLEGAL_ACCESS, "at 0x10"))


def test_times_of_a_route_that_is_not_proven_safe_mean_nothing() -> None:
    rounds = rounds_of(16, ctx=12.0, fast=10.0, bad=1.0)
    fast, bad = standings_of(evidence(FAST, UNSAFE, rounds=rounds), TEST, Question())
    assert (fast.state, fast.speedup, fast.wins) == (State.CLAIM, 1.2, True)
    assert (bad.state, bad.speedup, bad.speedup_low, bad.wins) == (None, None, None, False)


def test_who_is_beaten_is_so_by_common_rounds_alone() -> None:
    slow, other = Candidate("slow", SAFE), Candidate("other", SAFE)
    rounds = rounds_of(16, ctx=12.0, fast=9.0, slow=10.0) + rounds_of(16, 16, ctx=12.0, other=5.0)
    winners = standings_of(evidence(FAST, slow, other, rounds=rounds), TEST, Question())
    assert [each.wins for each in winners] == [True, True, True]
    assert [beaten(each, winners, rounds, TEST, graph) for each in winners] == [False, True, False]
    assert [each.name for each in unbeaten(winners, rounds, TEST, graph)] == ["fast", "other"]
    fast, _, third = winners
    assert contestable(fast, third, rounds, TEST, graph, 16)  # they have met in no round
    assert not contestable(fast, third, rounds, TEST, graph, 2)


def test_a_share_of_dropped_rounds_is_too_many() -> None:
    rounds = rounds_of(10, ctx=2.0, fast=1.0)
    lost = [replace(each, dropped="hw_slowdown") for each in rounds]
    assert not disturbed([*lost[:2], *rounds[2:]])
    assert disturbed([*lost[:3], *rounds[3:]])


@given(
    st.lists(st.floats(0.8, 1.6), min_size=1, max_size=60),
    st.integers(1, 60),
    st.floats(0.0, 0.2),
)
@settings(max_examples=200, deadline=None)
def test_claim_and_bound_agree_at_any_margin_that_tau_makes(ratios: list[float], n: int, tau: float) -> None:
    rounds = [rounds_of(1, i, ctx=ratio, fast=1.0)[0] for i, ratio in enumerate(ratios)]
    (standing,) = decide(evidence(FAST, rounds=rounds), SignTest(0.05, n, drop_at=10**30), tau=tau).standings
    margin = max(0.05, 3 * tau)
    bound = standing.speedup_low
    claims = standing.state is State.CLAIM
    if bound is None or abs(bound - 1 - margin) > 1e-5:  # margins are rounded to 6 digits
        assert claims == (bound is not None and bound > 1 + margin)
    assert standing.near == (claims and bound is not None and bound <= 1 + round(margin, 6) + 3 * tau)


def test_beside_a_fallback_that_joined_late_every_route_has_its_rounds_ahead() -> None:
    rounds = rounds_of(120, fast=10.0) + rounds_of(8, first=120, ctx=20.0, fast=10.0)
    known = evidence(FAST, rounds=rounds)
    assert rounds_left(rounds, ("ctx", "fast"), 128) == 120
    assert most_left([known, replace(known, fallback="other")], ("ctx", "fast"), rounds, 128) == 120
    assert decide(known, TEST).standings[0].state is State.CONTINUE
    assert plan_next(known, TEST) == ("ctx", "fast")
    won = evidence(FAST, rounds=rounds + rounds_of(8, first=128, ctx=20.0, fast=10.0))
    assert decide(won, TEST).decision.route == "fast"


def test_a_route_that_joined_late_has_its_own_rounds_ahead() -> None:
    late = Candidate("late", SAFE)
    rounds = rounds_of(120, ctx=20.0, fast=20.0) + rounds_of(8, first=120, ctx=20.0, fast=20.0, late=10.0)
    assert [rounds_left(rounds, ("ctx", name), 128) for name in ("fast", "late", "new")] == [0, 120, 128]
    known = evidence(FAST, late, rounds=rounds)
    assert plan_next(known, TEST) == ("ctx", "late")
    assert decide(known, TEST).decision.reason is Reason.UNPROVEN
    won = evidence(FAST, late, rounds=rounds + rounds_of(24, first=128, ctx=20.0, late=10.0))
    assert decide(won, TEST).decision.route == "late"
    assert plan_next(won, TEST) == ()
    spent = evidence(FAST, late, rounds=rounds + rounds_of(120, first=128, ctx=20.0, late=20.0))
    assert plan_next(spent, TEST) == ()
    assert decide(spent, TEST).decision.route is None


def test_a_route_may_not_compete_with_itself() -> None:
    with pytest.raises(ValueError, match="must differ"):
        evidence(Candidate("ctx", SAFE))
