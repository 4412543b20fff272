from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.bench.eprocess import SignTest, State, Unit, e_value
from autotune.bench.objective import paired_ratios, step
from autotune.bench.record import Round
from autotune.domain.decision import Reason
from autotune.domain.verdict import FailureKind, Status, Verdict
from autotune.tuner.decide import decide, plan_next, plan_second
from autotune.tuner.standing import AGREE_ROUNDS, Candidate, Evidence, Question
from tests.tuner.paired import FAST, SAFE, TEST, evidence, rounds_of, rounds_with

UNSAFE = Verdict(Status.UNSAFE, FailureKind.ILLEGAL_ACCESS, "at 0x10")
UNPROVEN = Verdict(Status.UNPROVEN, reason="budget")
UNSUPPORTED = Verdict(Status.UNSUPPORTED, reason="no fp8")
REFUSED = Verdict(Status.REFUSED, reason="table too narrow")


def test_proven_safe_and_faster_is_named_with_its_numbers() -> None:
    found = decide(evidence(FAST, rounds=rounds_of(20, ctx=30.0, fast=20.0), stock="fast"), TEST)
    decision = found.decision
    assert (decision.route, decision.reason) == ("fast", Reason.PROVEN_FASTER)
    assert decision.speedup_low == decision.speedup == 1.5
    assert decision.vs_stock == 1.0
    assert "after 13 rounds, 13 above" in decision.detail
    assert found.standings[0].state is State.CLAIM


@pytest.mark.parametrize(
    ("candidate", "rounds", "reason", "detail"),
    [
        (FAST, rounds_of(12, ctx=30.0, fast=20.0), Reason.UNPROVEN, "fast: timing stopped after 12"),
        (FAST, [], Reason.UNPROVEN, "fast: not timed yet"),
        (FAST, rounds_of(7, ctx=20.0, fast=20.0), Reason.NOT_FASTER, "fast: 0 of 7"),
        (FAST, rounds_of(128, ctx=21.0, fast=20.0), Reason.UNDECIDED, "fast: 0 of 128"),
        (Candidate("u", UNSAFE), [], Reason.CANDIDATE_UNSAFE, "u: illegal_access at 0x10"),
        (Candidate("u", UNPROVEN), [], Reason.UNPROVEN, "u: budget"),
        (Candidate("u", UNSUPPORTED), [], Reason.UNSUPPORTED, "u: no fp8"),
        (Candidate("u", REFUSED), [], Reason.UNSUPPORTED, "u: table too narrow"),
        (Candidate("u", UNSAFE), rounds_of(20, ctx=30.0, u=1.0), Reason.CANDIDATE_UNSAFE, "u:"),
        (Candidate("u", UNPROVEN), rounds_of(20, ctx=30.0, u=1.0), Reason.UNPROVEN, "u:"),
    ],
)
def test_every_other_reason(candidate: Candidate, rounds: list[Round], reason: Reason, detail: str) -> None:
    decision = decide(evidence(candidate, rounds=rounds), TEST).decision
    assert (decision.route, decision.reason) == (None, reason)
    assert decision.detail.startswith(detail)


@pytest.mark.parametrize(
    ("verdict", "too_large", "reason"),
    [
        (UNSAFE, "", Reason.NO_SAFE_ROUTE),
        (UNSAFE, "needs 300 GiB", Reason.NO_SAFE_ROUTE),
        (UNSUPPORTED, "", Reason.NO_SAFE_ROUTE),
        (REFUSED, "", Reason.NO_SAFE_ROUTE),
        (UNPROVEN, "", Reason.UNPROVEN),
        (UNPROVEN, "needs 300 GiB", Reason.TOO_LARGE),
        (SAFE, "needs 300 GiB", Reason.TOO_LARGE),
    ],
)
def test_a_fallback_without_proof_is_said_whatever_the_candidates(
    verdict: Verdict, too_large: str, reason: Reason
) -> None:
    known = evidence(
        FAST, rounds=rounds_of(50, ctx=30.0, fast=1.0), fallback_verdict=verdict, too_large=too_large
    )
    assert decide(known, TEST).decision.reason is reason
    assert plan_next(known, TEST) == ()


def test_no_candidate_at_all_is_unsupported() -> None:
    assert decide(evidence(), TEST).decision.reason is Reason.UNSUPPORTED


def test_an_undeployable_route_is_advice_never_an_answer() -> None:
    shown = Candidate("fa9", SAFE, deployable=False)
    found = decide(evidence(shown, FAST, rounds=rounds_of(20, ctx=30.0, fa9=10.0, fast=30.0)), TEST)
    assert found.decision.reason is Reason.NOT_FASTER
    assert "not deployable here: fa9 3.00x" in found.decision.detail
    assert found.standings[0].state is State.CLAIM
    alone = decide(evidence(shown, rounds=rounds_of(20, ctx=30.0, fa9=10.0)), TEST)
    assert alone.decision.reason is Reason.UNSUPPORTED


def test_a_danger_is_said_before_a_gap_before_a_measurement() -> None:
    rounds = rounds_of(20, ctx=20.0, slow=20.0)
    slow, unproven, unsafe = Candidate("slow", SAFE), Candidate("p", UNPROVEN), Candidate("u", UNSAFE)
    assert (
        decide(evidence(slow, unproven, unsafe, rounds=rounds), TEST).decision.reason
        is Reason.CANDIDATE_UNSAFE
    )
    assert decide(evidence(slow, unproven, rounds=rounds), TEST).decision.reason is Reason.UNPROVEN
    rounds = rounds_of(20, ctx=20.0, slow=20.0, fast=10.0)
    assert decide(evidence(unsafe, slow, FAST, rounds=rounds), TEST).decision.route == "fast"


def test_of_two_proven_routes_the_faster_wins_whatever_it_requires() -> None:
    needy = Candidate("needy", Verdict(Status.SAFE, requires=("finite_pool",)))
    rounds = rounds_of(20, ctx=30.0, fast=20.0, needy=19.9)
    assert decide(evidence(FAST, needy, rounds=rounds), TEST).decision.route == "needy"


def test_undecided_between_proven_routes_fewer_requires_then_less_prepare_then_name() -> None:
    needy = Candidate("a-needy", Verdict(Status.SAFE, requires=("finite_pool",)))
    alike = rounds_with({"ctx": 30.0, "fast": 20.0, "a-needy": 20.0, "z": 20.0}, 20)
    assert decide(evidence(needy, FAST, rounds=alike), TEST).decision.route == "fast"
    z = Candidate("z", SAFE)
    assert decide(evidence(z, FAST, rounds=alike), TEST).decision.route == "fast"
    lighter = rounds_of(20, ctx=30.0, fast=20.0, z=20.0, prepare={"fast": 5.0, "z": 4.0})
    assert decide(evidence(FAST, z, rounds=lighter), TEST).decision.route == "z"


def test_a_circle_of_winners_falls_to_the_tie_break() -> None:
    # a beats b beats c beats a in two rounds of three
    times = ((10.0, 11.0, 12.0), (12.0, 10.0, 11.0), (11.0, 12.0, 10.0))
    rounds = []
    for i in range(128):
        a, b, c = times[i % 3]
        rounds += rounds_of(1, first=i, ctx=30.0, a=a, b=b, c=c)
    found = decide(evidence(*(Candidate(name, SAFE) for name in "cba"), rounds=rounds), TEST)
    assert found.decision.route == "a"


def test_rounds_after_a_final_state_change_nothing() -> None:
    claimed = rounds_of(13, ctx=30.0, fast=20.0) + rounds_of(50, first=13, ctx=10.0, fast=20.0)
    assert decide(evidence(FAST, rounds=claimed), TEST).decision.route == "fast"
    dropped = rounds_of(7, ctx=20.0, fast=20.0) + rounds_of(50, first=7, ctx=90.0, fast=20.0)
    assert decide(evidence(FAST, rounds=dropped), TEST).decision.route is None


def test_stored_order_does_not_matter() -> None:
    rounds = rounds_of(7, ctx=20.0, fast=20.0) + rounds_of(50, first=7, ctx=90.0, fast=20.0)
    assert decide(evidence(FAST, rounds=rounds[::-1]), TEST) == decide(evidence(FAST, rounds=rounds), TEST)


def test_the_objective_can_change_without_new_rounds() -> None:
    rounds = rounds_of(20, ctx=30.0, fast=20.0, prepare={"fast": 100.0, "ctx": 0.0})
    assert decide(evidence(FAST, rounds=rounds), TEST).decision.route == "fast"
    assert decide(evidence(FAST, rounds=rounds), TEST, objective=step(1)).decision.route is None
    assert decide(evidence(FAST, rounds=rounds), TEST, objective=step(60)).decision.route == "fast"


def test_the_stock_is_shown_beside_a_fallback_too() -> None:
    decision = decide(evidence(FAST, rounds=rounds_of(9, ctx=20.0, fast=25.0), stock="fast"), TEST).decision
    assert decision.route is None
    assert decision.vs_stock == 1.25
    assert decide(evidence(FAST, stock="absent"), TEST).decision.vs_stock is None


def test_plan_times_what_is_open_and_stops_with_the_last_answer() -> None:
    slow = Candidate("slow", SAFE)
    both = evidence(FAST, slow, Candidate("u", UNSAFE), Candidate("p", UNPROVEN))
    assert plan_next(both, TEST) == ("ctx", "fast", "slow")
    seven = replace(both, rounds=rounds_of(7, ctx=30.0, fast=20.0, slow=30.0))
    assert plan_next(seven, TEST) == ("ctx", "fast")
    rest = rounds_of(6, first=7, ctx=30.0, fast=20.0)
    assert plan_next(replace(both, rounds=[*seven.rounds, *rest]), TEST) == ()
    assert plan_next(evidence(Candidate("u", UNSAFE)), TEST) == ()


def test_plan_goes_on_while_winners_are_not_told_apart() -> None:
    z = Candidate("z", SAFE)
    alike = evidence(FAST, z, rounds=rounds_of(13, ctx=30.0, fast=20.0, z=20.0))
    assert plan_next(alike, TEST) == ("ctx", "fast", "z")
    apart = evidence(FAST, z, rounds=rounds_of(13, ctx=30.0, fast=20.0, z=19.0))
    assert plan_next(apart, TEST) == ()
    advice = evidence(
        FAST, Candidate("z", SAFE, deployable=False), rounds=rounds_of(13, ctx=30.0, fast=20.0, z=20.0)
    )
    assert plan_next(advice, TEST) == ()


def test_a_winner_that_another_beats_leaves_and_so_does_a_beaten_candidate() -> None:
    a, b, c = (Candidate(name, SAFE) for name in "abc")
    # all claim; c is alike with b, and both beat a: only b and c need more rounds
    three = evidence(a, b, c, rounds=rounds_of(13, ctx=30.0, a=20.0, b=19.0, c=19.0))
    assert plan_next(three, TEST) == ("ctx", "b", "c")
    # a is still open against the fallback, and can win no more: b claims and beats it
    half = [rounds_of(1, i, ctx=20.0, a=20.0 if i % 2 else 18.0, b=10.0)[0] for i in range(13)]
    two = evidence(a, b, rounds=half)
    assert decide(two, TEST).standings[0].state is State.CONTINUE
    assert decide(two, TEST).decision.route == "b"
    assert plan_next(two, TEST) == ()
    # beaten by advice only, it goes on
    advice = evidence(a, replace(b, deployable=False), rounds=half)
    assert plan_next(advice, TEST) == ("ctx", "a")
    # and where the winner turns out unsafe, it is back
    lost = evidence(a, replace(b, verdict=UNSAFE), rounds=half)
    assert plan_next(lost, TEST) == ("ctx", "a")


def test_a_candidate_whose_chance_is_gone_leaves_early_and_is_undecided() -> None:
    def half_above(n: int) -> list[Round]:
        return [rounds_of(1, i, ctx=20.0, fast=20.0 if i % 2 else 10.0)[0] for i in range(n)]

    last = next(n for n in range(1, 128) if not plan_next(evidence(FAST, rounds=half_above(n)), TEST))
    assert 64 < last < 128
    left = 128 - last
    # as few as that: not even a run of "above" to the end would claim, and one round before it would have
    won = half_above(last) + rounds_of(left, last, ctx=20.0, fast=10.0)
    assert decide(evidence(FAST, rounds=won), TEST).decision.reason is Reason.UNDECIDED
    before = half_above(last - 1) + rounds_of(left + 1, last - 1, ctx=20.0, fast=10.0)
    assert decide(evidence(FAST, rounds=before), TEST).decision.reason is Reason.PROVEN_FASTER
    answer = decide(evidence(FAST, rounds=half_above(last)), TEST).decision
    assert answer.reason is Reason.UNDECIDED


def test_winners_that_can_no_longer_be_told_apart_are_not_timed_to_the_last_round() -> None:
    z = Candidate("z", SAFE)
    rounds = [rounds_of(1, i, ctx=30.0, fast=10.0, z=11.0 if i % 2 else 9.0)[0] for i in range(127)]
    last = next(n for n in range(13, 128) if not plan_next(evidence(FAST, z, rounds=rounds[:n]), TEST))
    assert 64 < last < 127


def claimed(ratio: float, n: int = 16) -> list[Round]:
    return rounds_of(n, ctx=10.0 * ratio, fast=10.0)


def test_tau_raises_the_margin_and_the_stored_rounds_are_read_again() -> None:
    known = evidence(FAST, rounds=claimed(1.10))
    assert decide(known, TEST).decision.route == "fast"
    assert decide(known, TEST, tau=0.018).decision.reason is Reason.UNPROVEN  # 1.10 > 1.05, but near
    high = decide(known, TEST, tau=0.04)
    assert high.decision.reason is Reason.NOT_FASTER  # 1.10 < 1.12
    assert plan_next(known, TEST, questions=[Question(tau=0.04)]) == ()
    # claimed at the floor, straddles the raised margin: it is timed on before it is given up
    straddling = [rounds_of(1, i, ctx=11.0 if i % 2 else 11.5, fast=10.0)[0] for i in range(13)]
    known = evidence(FAST, rounds=straddling)
    assert plan_next(known, TEST) == ()
    assert plan_next(known, TEST, questions=[Question(tau=0.04)]) == ("ctx", "fast")
    assert decide(known, TEST, tau=0.04).decision.reason is Reason.UNPROVEN
    better = [*straddling, *rounds_of(60, 13, ctx=13.0, fast=10.0)]
    assert decide(evidence(FAST, rounds=better), TEST, tau=0.02).decision.route == "fast"


def test_a_near_claim_waits_for_a_second_process_and_follows_it() -> None:
    near = evidence(FAST, rounds=claimed(1.10), stock="ctx")
    question = [Question(tau=0.02)]
    waiting = decide(near, TEST, tau=0.02).decision
    assert (waiting.route, waiting.reason) == (None, Reason.UNPROVEN)
    assert waiting.detail == "fast: its bound 1.100 is under 1.120: a second process must agree"
    assert plan_next(near, TEST, questions=question) == ()
    assert plan_second(near, TEST, questions=question) == ("ctx", "fast")
    assert plan_second(near, TEST) == ()
    some = replace(near, again=claimed(1.09, 6))
    assert plan_second(some, TEST, questions=question) == ("ctx", "fast")
    assert "6 rounds of it are timed" in decide(some, TEST, tau=0.02).decision.detail
    agreed = replace(near, again=claimed(1.09, 7))
    answer = decide(agreed, TEST, tau=0.02).decision
    assert (answer.route, answer.speedup_low) == ("fast", 1.1)
    assert answer.detail.endswith("; a second process agreed after 7, 7 above")
    assert plan_second(agreed, TEST, questions=question) == ()
    refused = replace(near, again=claimed(1.05, 7))
    answer = decide(refused, TEST, tau=0.02).decision
    assert (answer.route, answer.reason) == (None, Reason.UNDECIDED)
    assert answer.detail == "fast: claimed, but a second process did not agree: 0 of 7 above the margin"
    assert plan_second(refused, TEST, questions=question) == ()
    # all of them without an answer is no agreement
    flat = [rounds_of(1, i, ctx=10.0 if i % 2 else 20.0, fast=10.0)[0] for i in range(AGREE_ROUNDS)]
    spent = decide(replace(near, again=flat), TEST, tau=0.02)
    assert spent.decision.reason is Reason.UNDECIDED
    # a claim that is far enough needs nobody, whatever a second process says
    far = evidence(FAST, rounds=claimed(1.2), again=claimed(1.0, 16))
    assert decide(far, TEST, tau=0.02).decision.route == "fast"


def test_more_rounds_may_spare_a_near_claim_its_second_process() -> None:
    question = [Question(tau=0.02)]
    low = [rounds_of(1, i, ctx=11.0 if i % 2 else 13.0, fast=10.0)[0] for i in range(16)]
    claim = evidence(FAST, rounds=low)  # every other round is past the near zone
    (standing,) = decide(claim, TEST, tau=0.02).standings
    assert standing.near and standing.clearing
    assert plan_next(claim, TEST, questions=question) == ("ctx", "fast")
    assert plan_next(claim, TEST) == ()  # without tau a claim is the end
    waiting = decide(claim, TEST, tau=0.02).decision
    assert waiting.reason is Reason.UNPROVEN
    assert (
        waiting.detail == "fast: its bound 1.100 is under 1.120: more rounds or a second process must agree"
    )
    # they carry its bound out of the zone
    past = evidence(FAST, rounds=[*low, *rounds_of(40, 16, ctx=13.0, fast=10.0)])
    assert plan_next(past, TEST, questions=question) == plan_second(past, TEST, questions=question) == ()
    assert decide(past, TEST, tau=0.02).decision.route == "fast"
    # or they do not, or none is left: then it is the second process's turn
    for more in (rounds_of(40, 16, ctx=11.0, fast=10.0), [replace(it, index=it.index + 112) for it in low]):
        short = evidence(FAST, rounds=[*low, *more])
        assert plan_next(short, TEST, questions=question) == ()
        assert plan_second(short, TEST, questions=question) == ("ctx", "fast")
    # one that has agreed ends it, one that is under way does not stop the rounds
    agreed = replace(claim, again=claimed(1.09, 7))
    assert plan_next(agreed, TEST, questions=question) == ()
    assert decide(agreed, TEST, tau=0.02).decision.route == "fast"
    assert plan_next(replace(claim, again=claimed(1.09, 6)), TEST, questions=question) == ("ctx", "fast")


def test_only_the_answer_needs_a_second_process() -> None:
    sure, near = Candidate("sure", SAFE), Candidate("near", SAFE)
    question = [Question(tau=0.02)]
    slower = evidence(sure, near, rounds=rounds_of(16, ctx=12.0, sure=10.0, near=11.0))
    assert decide(slower, TEST, tau=0.02).decision.route == "sure"
    assert plan_second(slower, TEST, questions=question) == ()
    # it joined late, on a slower fallback: a near claim, that yet beats the sure one
    rounds = rounds_of(16, ctx=12.0, sure=10.0) + rounds_of(16, 16, ctx=10.9, sure=10.0, near=9.8)
    known = evidence(sure, near, rounds=rounds)
    assert decide(known, TEST, tau=0.02).decision.reason is Reason.UNPROVEN
    assert plan_second(known, TEST, questions=question) == ("ctx", "near")
    refused = replace(known, again=rounds_of(16, ctx=9.0, near=9.8))
    assert decide(refused, TEST, tau=0.02).decision.route == "sure"
    advice = evidence(sure, replace(near, deployable=False), rounds=rounds)
    assert decide(advice, TEST, tau=0.02).decision.route == "sure"
    assert plan_second(advice, TEST, questions=question) == ()


def test_a_second_process_on_a_slowed_device_is_timed_on() -> None:
    near = evidence(FAST, rounds=claimed(1.10))
    slow = [replace(each, dropped="hw_slowdown") for each in claimed(1.2, 8)]
    again = replace(near, again=[*claimed(1.09, 7), *(replace(each, index=each.index + 7) for each in slow)])
    assert plan_second(again, TEST, questions=[Question(tau=0.02)]) == ("ctx", "fast")


def test_dropped_rounds_do_not_count_and_too_many_of_them_leave_the_cell_undecided() -> None:
    def dropped(rounds: list[Round]) -> list[Round]:
        return [replace(one, dropped="hw_thermal_slowdown") for one in rounds]

    good = rounds_of(40, ctx=2.0, fast=1.0)
    few = evidence(FAST, rounds=good + dropped(rounds_of(8, 40, ctx=1.0, fast=9.0)))
    assert decide(few, TEST).decision.route == "fast"
    assert decide(few, TEST).decision.speedup == 2.0
    assert plan_next(few, TEST) == ()
    many = evidence(FAST, rounds=good + dropped(rounds_of(12, 40, ctx=2.0, fast=1.0)))
    assert decide(many, TEST).decision.route is None
    assert plan_next(many, TEST) == ("ctx", "fast")  # more rounds may outweigh them
    spent = evidence(FAST, rounds=good + dropped(rounds_of(88, 40, ctx=2.0, fast=1.0)))
    assert plan_next(spent, TEST) == ()
    answer = decide(spent, TEST).decision
    assert (answer.route, answer.reason) == (None, Reason.UNDECIDED)
    assert answer.detail == "88 of 128 rounds were dropped: hw_thermal_slowdown"


def beats(a: str, b: str, rounds: Sequence[Round]) -> bool:
    return SignTest(0.0, 1).follow(paired_ratios(rounds, b, a)).state is State.CLAIM


TIMES = st.sampled_from([8.0, 9.5, 10.0, 10.5, 12.0])
VERDICTS = st.sampled_from([SAFE, SAFE, SAFE, UNSAFE, UNPROVEN, UNSUPPORTED, REFUSED])


@st.composite
def cells(draw: st.DrawFn) -> Evidence:
    names = [f"r{i}" for i in range(draw(st.integers(0, 3)))]
    candidates = [Candidate(name, draw(VERDICTS), draw(st.booleans())) for name in names]
    count = draw(st.integers(0, 40))
    favour = {name: draw(st.sampled_from([1.0, 1.0, 0.7])) for name in names}
    rounds: list[Round] = []
    for i in range(count):
        times = {"ctx": draw(TIMES), **{name: draw(TIMES) * favour[name] for name in names}}
        rounds += rounds_with(times, 1, i)
    return Evidence("ctx", draw(VERDICTS), candidates, rounds, draw(st.sampled_from([None, "ctx", "r0"])))


@given(cells(), st.sampled_from([1, 3, 50]), st.sampled_from(list(Unit)))
@settings(max_examples=300, deadline=None)
def test_no_route_is_named_without_all_of_its_proof(known: Evidence, multiplicity: int, unit: Unit) -> None:
    test = SignTest(0.05, multiplicity, unit=unit)
    found = decide(known, test)
    if found.decision.route is None:
        assert found.decision.reason is not Reason.PROVEN_FASTER
        return
    assert known.fallback_verdict.status is Status.SAFE
    (chosen,) = [c for c in known.candidates if c.name == found.decision.route]
    assert chosen.verdict.status is Status.SAFE
    assert chosen.deployable
    ratios = paired_ratios(known.rounds, "ctx", chosen.name, unit=unit)
    reached = [
        e_value(n, sum(ratio > 1.05 for ratio in ratios[:n])) >= multiplicity * 20
        for n in range(1, len(ratios) + 1)
    ]
    assert any(reached)
    assert found.decision.speedup_low is not None
    assert found.decision.speedup_low > 1.05


@given(cells())
@settings(max_examples=100, deadline=None)
def test_plan_is_empty_exactly_when_more_rounds_cannot_matter(known: Evidence) -> None:
    planned = plan_next(known, TEST)
    standings = decide(known, TEST).standings
    winners = [s.name for s in standings if s.wins]
    open_ones = [
        s.name
        for s in standings
        if s.state is State.CONTINUE
        # what a winner beats can win no more
        and not (s.candidate.deployable and any(beats(winner, s.name, known.rounds) for winner in winners))
    ]
    if planned:
        assert planned[0] == "ctx"
        assert set(open_ones) <= set(planned)
        assert all(c.verdict.status is Status.SAFE for c in known.candidates if c.name in planned)
    else:
        assert open_ones == []
