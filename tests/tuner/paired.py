"""Rounds with given times, and a cell's evidence of them."""

from __future__ import annotations

from autotune.bench.eprocess import SignTest
from autotune.bench.record import Round
from autotune.domain.verdict import Status, Verdict
from autotune.tuner.standing import Candidate, Evidence

SAFE = Verdict(Status.SAFE)
TEST = SignTest(margin=0.05, multiplicity=50)
FAST = Candidate("fast", SAFE)


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
