"""``benchmarks/sanitizer_cost.py``: real processes, the tool replaced; what is cut off keeps what it told."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from autotune.sanitizer import tool
from autotune.sanitizer.process import Captured
from autotune.tuner.deadline import Deadline
from benchmarks import sanitizer_cost
from benchmarks.sanitizer_cost import LAUNCHES, PLAIN, SAYS, UNDER, Cost, Look, Run, main, measure
from tests.sanitizer import outputs
from tests.sanitizer.fake import Fake

ROUTE = "torch-splitkv"
TELLS = "import sys, time; print('sanitizer_cost: launch 12.5 us', flush=True)"


def look(monkeypatch: pytest.MonkeyPatch, program: list[str], seconds: float = 300.0) -> Look:
    """As on a GPU, with ``program`` for the process that launches."""
    monkeypatch.setattr(sanitizer_cost, "words", lambda route, device: program)
    seen = Look()
    measure(ROUTE, "cuda", seen, Deadline(seconds), random.Random(1))
    return seen


def test_real_launches_with_a_tool_that_only_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake.on_path(tmp_path, monkeypatch)
    fake.says("========= ERROR SUMMARY: 0 errors\n", runs=True)
    monkeypatch.setattr(sanitizer_cost, "ROUNDS", 1)
    seen = look(monkeypatch, sanitizer_cost.words(ROUTE, "cpu"))
    found = seen.cost()
    assert found is not None, seen.said
    assert found.launches == (LAUNCHES, LAUNCHES) and min(found.launch_us) > 0 and found.factor > 0
    assert all(each is not None and each > 0 for each in found.process_s)
    assert len(fake.calls) == 1 and fake.calls[0].env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    assert seen.line().startswith(f"{ROUTE}, one small column: a launch takes ")


def test_both_ways_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake.on_path(tmp_path, monkeypatch)
    fake.says("", runs=True)
    seen = look(monkeypatch, [sys.executable, "-c", TELLS])
    assert [len(seen.runs[way]) for way in (UNDER, PLAIN)] == [sanitizer_cost.ROUNDS] * 2
    found = seen.cost()
    assert found is not None and found.launch_us == (12.5, 12.5) and found.factor == 1.0 and not seen.said


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (outputs.UNSUPPORTED, "no number: sanitizer: compute-sanitizer does not work on this device"),
        (outputs.AFTER, "no number: sanitizer: invalid global read of 4 bytes"),
    ],
)
def test_a_tool_that_gives_none(
    output: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fake.on_path(tmp_path, monkeypatch).says(output)
    assert look(monkeypatch, [sys.executable, "-c", TELLS]).line().startswith(said)


def test_a_process_that_is_cut_off_keeps_its_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fake.on_path(tmp_path, monkeypatch)
    limits: list[float] = []

    def captured(words: list[str], env: dict[str, str], timeout_s: float) -> Captured:
        limits.append(timeout_s)
        under = words[0].endswith(tool.NAME)
        return Captured(f"{outputs.BANNER if under else ''}{SAYS} launch 12.5 us\n", -9 * under, late=under)

    monkeypatch.setattr(sanitizer_cost, "capture", captured)
    seen = look(monkeypatch, [sys.executable])
    found = seen.cost()
    assert found is not None and found.launches == (1, 1) and found.process_s[0] is None
    assert seen.said == "the process under the tool was cut off after: launch 12.5 us"
    assert "its whole process cut off and " in found.line() and found.line().endswith(seen.said)
    assert limits == [sanitizer_cost.PROCESS_S] * 2


def test_a_signal_loses_no_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fake.on_path(tmp_path, monkeypatch)
    ways = iter(
        [Captured(f"{SAYS} launch 2.0 us\n", 0), Captured(f"{outputs.BANNER}{SAYS} launch 6.0 us\n", 0)]
    )
    monkeypatch.setattr(sanitizer_cost, "capture", lambda *_: next(ways))  # then it stops
    monkeypatch.setattr(sanitizer_cost, "words", lambda route, device: [sys.executable])
    seen = Look()
    with pytest.raises(StopIteration):
        measure(ROUTE, "cuda", seen, Deadline(300.0), random.Random(1))
    found = seen.cost()
    assert found is not None and found.launch_us == (6.0, 2.0) and found.said == "cut off"
    assert "(3.0 x, 1 and 1 launches)" in found.line() and found.line().endswith("; cut off")


def test_a_process_that_fails_or_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fake.on_path(tmp_path, monkeypatch).says("", runs=True)
    program = [sys.executable, "-c", "import sys; sys.exit('sanitizer_cost: ValueError: no such kernel')"]
    said = look(monkeypatch, program).line()
    assert said.endswith("the process ended with status 1: sanitizer_cost: ValueError: no such kernel")
    assert look(monkeypatch, program, seconds=0.0).line() == "no number: no time left"


def test_where_there_is_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "find", lambda: None)
    assert look(monkeypatch, []).line() == "no number: compute-sanitizer is not installed"
    seen = Look()
    measure(ROUTE, "cpu", seen, Deadline(1.0), random.Random(1))
    assert seen.line() == "no number: compute-sanitizer is for CUDA"


def test_medians_of_all_launches() -> None:
    seen = Look("fa2")
    seen.runs[PLAIN] += [Run(5.0, (40.0, 50.0), ""), Run(7.0, (60.0,), "")]
    assert seen.cost() is None and seen.line() == "no number: not reached"
    seen.runs[UNDER] += [Run(9.0, (1000.0, 3000.0), ""), Run(None, (2000.0,), "")]
    assert seen.cost() == Cost("fa2", (2000.0, 50.0), (9.0, 6.0), (3, 3), "not reached")


def test_a_launch_that_fails_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["none", "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("sanitizer_cost: UnknownRoute: unknown route 'none'")
