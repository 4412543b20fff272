"""Interleaved rounds of A and B, and what may be said of them.

A round is one turn of each server on the same prompts, in random order: what drifts (clocks, neighbours)
meets both. Its value is one ratio a metric, B over A, above 1 where B is better. The bounds invert the sign
e-process of ``autotune.bench.eprocess``: valid at any stop, without an assumption on the distribution, and
jointly for all cases, both metrics and both directions. They are of the median ratio between these two
servers in this run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autotune.bench.eprocess import lower_bound
from autotune.engines.ab.server import Server
from autotune.engines.ab.turn import Case, Turn, take_turn

METRICS = ("tokens_per_s", "per_token_s")
ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class Ratio:
    """B over A of one metric; above 1 B is better.

    Attributes:
        median: over the rounds.
        low, high: bounds of the median ratio; None where there are too few rounds for any.
    """

    median: float
    low: float | None
    high: float | None
    rounds: int

    @property
    def better(self) -> str | None:
        """``b``, ``a``, or None: undecided."""
        if self.low is not None and self.low > 1.0:
            return "b"
        return "a" if self.high is not None and self.high < 1.0 else None


@dataclass
class Rounds:
    """All turns of one case."""

    case: Case
    turns: list[tuple[Turn, Turn]] = field(default_factory=list)

    def ratio(self, metric: str, claims: int) -> Ratio | None:
        """Of one metric, at ``claims`` claims in all; None where a server gives no such times."""
        ratios = []
        for a, b in self.turns:
            of_a, of_b = getattr(a, metric), getattr(b, metric)
            if of_a is None or of_b is None:
                return None
            # a rate is better high, a time low
            ratios.append(of_b / of_a if metric == "tokens_per_s" else of_a / of_b)
        if not ratios:
            return None
        inverse = lower_bound([1.0 / ratio for ratio in ratios], claims, ALPHA)
        return Ratio(
            statistics.median(ratios),
            lower_bound(ratios, claims, ALPHA),
            None if inverse is None else 1.0 / inverse,
            len(ratios),
        )

    def median(self, side: int, metric: str) -> float | None:
        """Of one server's own values."""
        values = [value for turn in self.turns if (value := getattr(turn[side], metric)) is not None]
        return statistics.median(values) if values else None

    @property
    def same_answers(self) -> tuple[int, int]:
        """Requests that both servers answered alike, of all: greedy texts part at near ties."""
        pairs = [pair for a, b in self.turns for pair in zip(a.texts, b.texts, strict=True)]
        return sum(a == b for a, b in pairs), len(pairs)


def compare(
    a: Server,
    b: Server,
    cases: list[Case],
    *,
    rounds: int,
    model: str | None = None,
    flush: bool = True,
    switch: Callable[[Server, str], None] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Rounds]:
    """Run all cases.

    Args:
        rounds: per case; one more is run before and thrown away.
        model: None takes the first that each server lists.
        switch: called with the server and ``a`` or ``b`` before each turn.

    Raises:
        ServerError: from either server; what was measured is then worth nothing.
        ValueError: less than one round, or no case.
    """
    if rounds < 1 or not cases:
        raise ValueError("at least one round and one case are needed")
    chance = random.Random(seed)
    sides = {"a": a, "b": b}
    models = {}
    for side, server in sides.items():
        if switch is not None:
            switch(server, side)
        models[side] = model or server.model()
    found = [Rounds(case) for case in cases]
    for at in range(rounds + 1):
        for of_case in found:
            took: dict[str, Turn] = {}
            for side in chance.sample(("a", "b"), 2):
                server = sides[side]
                if switch is not None:
                    switch(server, side)
                took[side] = take_turn(server, of_case.case, models[side], f"{seed}.{at}", flush=flush)
            if at:
                of_case.turns.append((took["a"], took["b"]))
        progress(f"round {at} of {rounds}" if at else "warm-up round")
    return found


def claims_of(cases: int) -> int:
    """All that the result could claim: cases x metrics x directions."""
    return cases * len(METRICS) * 2


def as_json(found: list[Rounds]) -> list[dict[str, Any]]:
    """One object a case."""
    claims = claims_of(len(found))
    made = []
    for rounds in found:
        case = rounds.case
        same, asked = rounds.same_answers
        entry: dict[str, Any] = {
            "concurrency": case.concurrency,
            "prompt_words": case.prompt_words,
            "max_tokens": case.max_tokens,
            "rounds": len(rounds.turns),
            "same_answers": same,
            "answers": asked,
        }
        for at, side in enumerate(("a", "b")):
            entry[side] = {name: rounds.median(at, name) for name in (*METRICS, "accept")}
        for metric in METRICS:
            ratio = rounds.ratio(metric, claims)
            entry[f"{metric}_ratio"] = ratio and {
                "median": ratio.median,
                "low": ratio.low,
                "high": ratio.high,
                "better": ratio.better,
            }
        made.append(entry)
    return made


def as_text(found: list[Rounds]) -> str:
    """A few lines a case."""
    claims = claims_of(len(found))
    lines = []
    for rounds in found:
        same, asked = rounds.same_answers
        lines.append(f"{rounds.case}: {len(rounds.turns)} rounds, {same} of {asked} answers alike")
        for metric, unit, scale in (("tokens_per_s", "tokens/s", 1.0), ("per_token_s", "ms a token", 1e3)):
            ratio = rounds.ratio(metric, claims)
            if ratio is None:
                lines.append(f"  {unit:>10}: a server sends its text in one piece; no times of tokens")
                continue
            of_a, of_b = rounds.median(0, metric) or 0.0, rounds.median(1, metric) or 0.0
            lines.append(
                f"  {unit:>10}: A {of_a * scale:.1f}, B {of_b * scale:.1f}; B/A {ratio.median:.3f} "
                f"[{_bound(ratio.low)}, {_bound(ratio.high)}]: {_verdict(ratio)}"
            )
        accepted = [rounds.median(side, "accept") for side in (0, 1)]
        shown = ["not offered" if value is None else f"{value:.2f}" for value in accepted]
        lines.append(f"  accept len: A {shown[0]}, B {shown[1]}")
    lines.append(f"bounds of the median ratio, all {claims} claims together false with at most {ALPHA:.0%}")
    return "\n".join(lines)


def _bound(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


def _verdict(ratio: Ratio) -> str:
    if ratio.better == "b" and ratio.low is not None:
        return f"B is better, by {ratio.low - 1:.1%} at least"
    if ratio.better == "a" and ratio.high is not None:
        return f"A is better, by {1 / ratio.high - 1:.1%} at least"
    return "undecided"
