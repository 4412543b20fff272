"""``benchmarks/guard_cost.py``: pairs in random order, equal operands, and what is told at the end."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path

import pytest
import torch

from autotune.arena.operands import build
from autotune.routes.registry import routes
from benchmarks import guard_cost
from benchmarks.guard_cost import Case, Meter, Paired, cases, launches, paired, set_up


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


def test_rounds_go_on_until_the_time() -> None:
    end = time.monotonic() + 0.05
    found = paired((lambda: 1.0, lambda: 1.0), random.Random(1), 2, end)
    assert found.rounds >= 2
    assert time.monotonic() >= end


def test_a_file_that_cannot_be_written_is_known_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        guard_cost.main(["--device", "cpu", "--json", str(tmp_path / "none" / "cost.json")])
    assert "cost.json: No such file or directory" in capsys.readouterr().err


def test_what_is_told_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.json"
    asked = ["--device", "cpu", "--routes", "torch-sdpa", "--seconds", "0", "--checks", "1", "--limit", "0"]
    assert guard_cost.main([*asked, "--json", str(path)]) == 1
    said = capsys.readouterr().out
    assert "not measured: torch-sdpa in" in said and "sanitizer: no number: no route was measured" in said
    found = json.loads(path.read_text())
    assert found["costs"] == [] and found["sanitizer"] == "no number: no route was measured"
    assert len(found["skipped"]) == len(cases("cpu"))
