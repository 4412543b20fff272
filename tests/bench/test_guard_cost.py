"""``benchmarks/guard_cost.py``: pairs in random order, equal operands, and a sanitizer that may not work."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
import torch

from autotune.arena.operands import build
from autotune.domain.fingerprint import Facts
from autotune.routes.registry import routes
from autotune.sanitizer import tool
from benchmarks import guard_cost
from benchmarks.guard_cost import Case, Meter, Paired, cases, launches, paired, sanitized, set_up
from tests.sanitizer import outputs
from tests.sanitizer.fake import Fake

FACTS = Facts("cuda", {"name": "none"}, {})


def test_pairs_are_taken_in_random_order() -> None:
    taken: list[str] = []
    clock = itertools.count(1)

    def way(name: str, value: float) -> float:
        taken.append(name)
        next(clock)
        return value

    found = paired((lambda: way("a", 3.0), lambda: way("b", 2.0)), random.Random(1), 40)
    assert found == Paired(3.0, 2.0, 1.5, (1.5, 1.5), 40)
    rounds = {tuple(taken[i : i + 2]) for i in range(0, 80, 2)}
    assert rounds == {("a", "b"), ("b", "a")}


def test_a_launch_is_timed_in_both_arenas_and_compared() -> None:
    torch.set_num_threads(1)
    case = cases("cpu")[0]
    found, requests = launches(
        routes("cpu")["torch-splitkv"], case, "cpu", Meter("cpu"), random.Random(1), 0.0
    )
    assert found.rounds == guard_cost.LEAST_ROUNDS
    assert min(found.first, found.second, *found.middle) > 0
    names = [name for name, *_ in requests]
    assert {"k_cache", "v_cache"} & set(names) or "kv_cache" in names
    for kind in ("host_mmap", "plain"):
        set_up(requests, kind, "cpu")


def test_different_results_are_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    made = itertools.count()
    recipe_of = guard_cost.recipe_of

    def other(arena: object, column: object, recipe: object, device: str) -> object:
        return build(arena, column, recipe_of(case, next(made)), device)  # type: ignore[arg-type]

    case: Case = cases("cpu")[0]
    monkeypatch.setattr(guard_cost, "build", other)
    with pytest.raises(RuntimeError, match="gave different results"):
        launches(routes("cpu")["torch-splitkv"], case, "cpu", Meter("cpu"), random.Random(1), 0.0)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (outputs.CLEAN, None),
        (outputs.UNSUPPORTED, "no number: sanitizer: compute-sanitizer does not work on this device"),
        (outputs.AFTER, "no number: sanitizer: invalid global read of 4 bytes"),
    ],
)
def test_the_sanitizer(
    output: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake.on_path(tmp_path, monkeypatch)
    fake.says(output)
    monkeypatch.setattr(tool, "proof", lambda repro: ["/bin/true"])
    found = sanitized(routes("cpu")["torch-sdpa"], cases("cuda")[0], FACTS, random.Random(1), 2)
    if said is None:
        assert isinstance(found, Paired)
        assert found.rounds == 2
        assert len(fake.calls) == 3
    else:
        assert isinstance(found, str)
        assert found.startswith(said)


def test_no_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    route, rng = routes("cpu")["torch-sdpa"], random.Random(1)
    monkeypatch.setattr(tool, "find", lambda: None)
    assert sanitized(route, cases("cuda")[0], FACTS, rng, 1) == "compute-sanitizer is not installed"
    here = Facts("cpu", {"name": "none"}, {})
    assert sanitized(route, cases("cpu")[0], here, rng, 1) == "compute-sanitizer is for CUDA"


def test_rounds_go_on_until_the_time() -> None:
    end = time.monotonic() + 0.05
    found = paired((lambda: 1.0, lambda: 1.0), random.Random(1), 2, end)
    assert found.rounds >= 2
    assert time.monotonic() >= end
