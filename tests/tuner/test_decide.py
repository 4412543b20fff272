from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.bench.eprocess import SignTest, State, Unit, e_value
from autotune.bench.objective import paired_ratios, step
from autotune.bench.record import Round
from autotune.domain.decision import Reason
from autotune.domain.verdict import FailureKind, Status, Verdict
from autotune.tuner.decide import Candidate, Evidence, decide, plan_next

SAFE = Verdict(Status.SAFE)
UNSAFE = Verdict(Status.UNSAFE, FailureKind.ILLEGAL_ACCESS, "at 0x10")
UNPROVEN = Verdict(Status.UNPROVEN, reason="budget")
UNSUPPORTED = Verdict(Status.UNSUPPORTED, reason="no fp8")
REFUSED = Verdict(Status.REFUSED, reason="table too narrow")
TEST = SignTest(margin=0.05, multiplicity=50)


def rounds_of(n: int, first: int = 0, prepare: dict[str, float] | None = None, **times: float) -> list[Round]:
    return rounds_with(times, n, first, prepare)


def rounds_with(
    times: dict[str, float], n: int, first: int = 0, prepare: dict[str, float] | None = None
) -> list[Round]:
    names = tuple(times)
    prepares = {name: (prepare or {}).get(name, 1.0) for name in names}
    calls = dict.fromkeys(names, 1)
    return [Round(i, names, times, times, prepares, calls) for i in range(first, first + n)]


def evidence(*candidates: Candidate, rounds: list[Round] | None = None, **more: object) -> Evidence:
    values: dict[str, object] = {"fallback_verdict": SAFE, **more}
    return Evidence("ctx", candidates=candidates, rounds=rounds or [], **values)  # type: ignore[arg-type]


FAST = Candidate("fast", SAFE)


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
        (FAST, [], Reason.UNPROVEN, "fast: timing stopped after 0"),
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


def test_plan_ends_when_the_rounds_are_used_up_even_for_a_late_route() -> None:
    late = Candidate("late", SAFE)
    rounds = rounds_of(120, ctx=20.0, fast=20.0) + rounds_of(8, first=120, ctx=20.0, fast=20.0, late=10.0)
    known = evidence(FAST, late, rounds=rounds)
    assert plan_next(known, TEST) == ()
    assert decide(known, TEST).standings[1].state is State.EXHAUSTED


def test_a_route_may_not_compete_with_itself() -> None:
    with pytest.raises(ValueError, match="must differ"):
        evidence(Candidate("ctx", SAFE))


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
    open_ones = [s.name for s in decide(known, TEST).standings if s.state is State.CONTINUE]
    if planned:
        assert planned[0] == "ctx"
        assert set(open_ones) <= set(planned)
        assert all(c.verdict.status is Status.SAFE for c in known.candidates if c.name in planned)
    else:
        assert open_ones == []
