"""Unsafe memory verdicts of a scripted sweep, under a compute-sanitizer that says what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.checks import registry
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import FailureKind, Status
from autotune.routes.base import Route
from autotune.sanitizer.examine import MEMORY, TIMEOUT_S, Ended, Examined
from autotune.sanitizer.finding import Finding, Nearest
from autotune.table.load import load_table
from autotune.tuner.book import ProofBook
from autotune.tuner.deadline import Deadline
from autotune.tuner.publish import accusations, publish
from autotune.tuner.publish import accused as accused_rows
from autotune.tuner.run import OpenedRun
from autotune.tuner.target import Target
from autotune.tuner.triage import MOST_LOOKS, triage, waiting
from tests.sanitizer import outputs
from tests.sanitizer.fake import Fake
from tests.tuner.scripted import ScriptedWorker, failed, opened, routes, sweep, target

CHECKS = registry.runs(target().grid.columns[0], "cuda")
FACTS = Facts(
    "cuda",
    {
        **{"name": "NVIDIA Test", "compute_capability": "9.0", "sm_count": 132, "memory_gib": 140},
        **{"l2_mib": 50, "power_limit_w": 700, "mig": False},
    },
    dict.fromkeys(("driver", "cuda", "flashinfer", "flashinfer_commit", "cubins"), "1"),
)
FOUND = Examined(Ended.FOUND, Finding("poke", "write", "global", 8, 16, nearest=Nearest("after", 1, 64)), 3)
NOTE = (
    "sanitizer: invalid global write of 8 bytes at 0x10, 1 byte after an allocation of 64 bytes, in poke; "
    "3 errors in all"
)
TOOL = Path("/opt/compute-sanitizer")


def on_cuda() -> Target:
    """The tiny space on a GPU that does not exist."""
    return replace(target(), facts=FACTS, device="cuda", arena_kind="cuda_vmm")


@contextmanager
def accused(
    folder: Path, known: dict[str, Route], kind: FailureKind = FailureKind.ILLEGAL_ACCESS
) -> Iterator[OpenedRun]:
    """A swept run in which each candidate fails its second check in both columns."""
    names = [name for name in known if name != "torch-sdpa"]
    with opened(folder, known, on_cuda()) as run:
        sweep(run, ScriptedWorker({(name, CHECKS[1]): failed(kind) for name in names}))
        yield run


class Looks:
    """Looks that answer in turn, the last answer for good."""

    def __init__(self, *answers: Examined) -> None:
        self.answers = answers
        self.seen: list[tuple[str, float]] = []

    def __call__(self, tool: Path, repro: str, timeout_s: float) -> Examined:
        assert tool == TOOL
        self.seen.append((repro, timeout_s))
        return self.answers[min(len(self.seen), len(self.answers)) - 1]


def look(run: OpenedRun, looks: Looks, seconds: float | None = None) -> str | None:
    return triage(run, Deadline(seconds), tool=lambda: TOOL, look=looks)


def details(run: OpenedRun) -> list[str]:
    return [item.detail for item in accusations(run)]


def test_a_finding_goes_behind_the_detail_and_is_not_looked_for_again(tmp_path: Path) -> None:
    looks = Looks(FOUND)
    with accused(tmp_path, routes("fast")) as run:
        before = details(run)
        said = look(run, looks)
        assert said == "2 of 2 unsafe memory verdicts looked at with compute-sanitizer, a finding for 2"
        assert details(run) == [f"{each}; {NOTE}" for each in before]
        assert [repro for repro, _ in looks.seen] == [item.repro for item in accusations(run)]
        assert {limit for _, limit in looks.seen} == {TIMEOUT_S}
        assert look(run, looks) is None
    with opened(tmp_path, routes("fast"), on_cuda()) as run:
        assert look(run, looks) is None  # nor by a later call
        assert len(looks.seen) == 2
        book = ProofBook(run.repository, run.fingerprint)
        for column in run.target.grid.columns:
            verdict = book.verdict(run.judge.routes["fast"], column, "cuda")
            assert (verdict.status, verdict.kind) == (Status.UNSAFE, FailureKind.ILLEGAL_ACCESS)


def test_it_reaches_the_table(tmp_path: Path) -> None:
    with accused(tmp_path, routes("fast"), FailureKind.OUT_OF_BOUNDS_WRITE) as run:
        look(run, Looks(FOUND))
        table = load_table(publish(run, tmp_path).path)
    assert [(row.kind, row.detail.endswith(NOTE)) for row in table.unsafe] == [
        ("out_of_bounds_write", True)
    ] * 2


def test_the_table_is_written_before_the_first_look(tmp_path: Path) -> None:
    class Interrupted(Looks):
        def __call__(self, tool: Path, repro: str, timeout_s: float) -> Examined:
            raise KeyboardInterrupt

    with accused(tmp_path, routes("fast")) as run:
        written: list[Path] = []
        with pytest.raises(KeyboardInterrupt):
            triage(
                run,
                Deadline(None),
                tool=lambda: TOOL,
                look=Interrupted(FOUND),
                first=lambda: written.append(publish(run, tmp_path).path),
            )
        assert load_table(*written).unsafe
        # and only where there is something to look at
        triage(run, Deadline(None), tool=lambda: None, first=lambda: written.append(tmp_path))
        assert len(written) == 1


def test_other_failures_are_not_looked_at(tmp_path: Path) -> None:
    with accused(tmp_path, routes("fast")) as run:
        proof = next(accused_rows(run))
    for kind in FailureKind:
        found = waiting([replace(proof, result=replace(proof.result, kind=kind))])
        assert len(found) == (kind in MEMORY), kind


def test_a_death_while_timing_has_no_command(tmp_path: Path) -> None:
    with opened(tmp_path, routes("fast"), on_cuda()) as run:
        sweep(run, ScriptedWorker(deaths={"fast"}))
        assert accusations(run)
        assert look(run, Looks(FOUND)) is None


def test_never_on_the_cpu(tmp_path: Path) -> None:
    with opened(tmp_path, routes("fast")) as run:
        sweep(run, ScriptedWorker({("fast", CHECKS[1]): failed(FailureKind.ILLEGAL_ACCESS)}))
        assert accusations(run)
        assert look(run, Looks(FOUND)) is None


def test_at_most_so_many_a_call_in_turn_of_each_route(tmp_path: Path) -> None:
    names = [f"fast-{letter}" for letter in "abcdef"]
    with accused(tmp_path, routes(*names)) as run:
        looks = Looks(FOUND)
        said = look(run, looks)
        assert said is not None
        assert said.startswith(f"{MOST_LOOKS} of 12 unsafe memory verdicts looked at")
        assert said.endswith("; the verdicts stand")
        looked = [repro.split()[2] for repro, _ in looks.seen]
        assert sorted(looked[:6]) == names
        assert len(looked) == MOST_LOOKS
        look(run, looks)
        assert len(looks.seen) == 12
        assert sorted(repro.split()[2] for repro, _ in looks.seen) == sorted(names * 2)


@pytest.mark.parametrize(
    ("answer", "said", "kept"),
    [
        (Examined(Ended.NOTHING), "a finding for 0; the verdicts stand", "sanitizer: no finding"),
        (
            Examined(Ended.LATE, said="not finished in 120 s"),
            "a finding for 0; not finished in 120 s; the verdicts stand",
            "sanitizer: not finished in 120 s",
        ),
        (Examined(Ended.FAILED, said="it broke"), "a finding for 0; it broke; the verdicts stand", None),
    ],
)
def test_without_a_finding(tmp_path: Path, answer: Examined, said: str, kept: str | None) -> None:
    with accused(tmp_path, routes("fast")) as run:
        before = details(run)
        looks = Looks(answer)
        line = look(run, looks)
        assert line == f"2 of 2 unsafe memory verdicts looked at with compute-sanitizer, {said}"
        if kept is None:
            assert details(run) == before
        else:
            assert all(detail.endswith(kept) for detail in details(run))
        look(run, looks)
        assert len(looks.seen) == (4 if kept is None else 2)


def test_a_tool_that_does_not_work_here_is_tried_once(tmp_path: Path) -> None:
    with accused(tmp_path, routes("fast")) as run:
        before = details(run)
        looks = Looks(Examined(Ended.REFUSED, said="no such device"))
        line = look(run, looks)
        assert line == "0 of 2 unsafe memory verdicts looked at; no such device; the verdicts stand"
        assert len(looks.seen) == 1
        assert details(run) == before


def test_a_tool_that_is_not_there(tmp_path: Path) -> None:
    with accused(tmp_path, routes("fast")) as run:
        before = details(run)
        line = triage(run, Deadline(None), tool=lambda: None, look=Looks(FOUND))
        assert line == (
            "2 unsafe memory verdicts not looked at: compute-sanitizer is not installed; the verdicts stand"
        )
        assert details(run) == before


def test_the_budget_ends_it(tmp_path: Path) -> None:
    with accused(tmp_path, routes("fast")) as run:
        looks = Looks(Examined(Ended.LATE, said="not finished in 60 s"))
        assert look(run, looks, 5.0) == (
            "0 of 2 unsafe memory verdicts looked at; the budget is spent; the verdicts stand"
        )
        assert looks.seen == []
        before = details(run)
        look(run, looks, 60.0)
        assert all(limit <= 60.0 for _, limit in looks.seen)
        assert details(run) == before  # cut short: a later call gives it its whole time


def test_the_executable_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake.on_path(tmp_path, monkeypatch)
    fake.says(outputs.BEFORE, status=1)
    with accused(tmp_path / "study", routes("fast")) as run:
        said = triage(run, Deadline(None))
        assert said == "2 of 2 unsafe memory verdicts looked at with compute-sanitizer, a finding for 2"
        assert all(
            "4 bytes before an allocation of 2,048 bytes, in acme::count" in each for each in details(run)
        )
        assert [call.argv[-1] for call in fake.calls] == ["--in-process"] * 2


def test_only_a_row_that_is_as_it_was_read_is_annotated(tmp_path: Path) -> None:
    with accused(tmp_path, routes("fast")) as run:
        proof = next(accused_rows(run))
        assert run.repository.annotate(run.fingerprint, proof, "seen")
        assert not run.repository.annotate(run.fingerprint, proof, "seen")
        (now,) = [p for p in accused_rows(run) if p.column == proof.column]
        assert now.result == replace(proof.result, detail=f"{proof.result.detail}; seen")
        assert now.created_at == proof.created_at
        passed = next(p for p in run.repository.all_proofs(run.fingerprint) if p.result.kind is None)
        assert not run.repository.annotate(run.fingerprint, passed, "seen")
