"""``benchmarks/agreement.py``, ``regret.py`` and ``policies.py`` on small studies whose times are made up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest

from autotune.bench.record import Round
from autotune.domain.decision import Decision, Reason
from autotune.domain.verdict import Status
from benchmarks import agreement, regret
from benchmarks.recorded import JudgedStudy, RecordedError, judged, opened, read, study_of
from tests.console import TINY
from tests.tuner.scripted import ScriptedWorker, failed, routes, sweep
from tests.tuner.scripted import opened as tuning

BASE, CANDIDATE = "torch-sdpa", "torch-splitkv"
KNOWN = routes(CANDIDATE)


@dataclass
class NoisyWorker(ScriptedWorker):
    """Times with 1 % noise of their own seed; orders at random."""

    seed: int = 1
    rng: Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)

    def _round(self, index: int, live: tuple[str, ...]) -> Round:
        order = tuple(self.rng.sample(live, len(live)))
        times = {name: self.times.get(name, 10.0) * (1 + self.rng.gauss(0, 0.01)) for name in order}
        return Round(index, order, times, times, dict.fromkeys(order, 1.0), dict.fromkeys(order, 1))


Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A study of the tiny space, with a candidate that takes ``time`` where the fallback takes 10."""

    def made(time: float, seed: int = 1, *, unsafe: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("study")
        checks = {(CANDIDATE, "reference"): failed()} if unsafe else {}
        with tuning(folder, KNOWN) as run:
            sweep(run, NoisyWorker(checks, times={CANDIDATE: time}, seed=seed))
        return folder / "sweep.db"

    return made


@pytest.fixture(scope="module")
def fast(make: Make) -> Path:
    return make(8.0)


def compared(one: Path, two: Path) -> agreement.Agreement:
    with opened(str(one)) as first, opened(f"sqlite:///{two}") as second:
        return agreement.compare(
            judged(first, str(one), "generic", space=TINY), judged(second, str(two), "generic", space=TINY)
        )


def test_two_studies_of_one_truth_agree(fast: Path, make: Make) -> None:
    found = compared(fast, make(8.0, 2))
    assert (found.common, found.decided, found.equal) == (4, 4, 4)
    assert (found.clear, found.clear_equal, found.opposite, found.differing) == (4, 4, (), ())
    assert found.proofs == 8
    for each in found.losses:
        assert each is not None
        assert (each.cells, each.mean, each.worst, each.where) == (4, 0.0, 0.0, "")


def test_another_truth_is_seen_and_costs_what_it_costs(fast: Path, make: Make) -> None:
    found = compared(fast, make(12.5, 3))
    assert (found.decided, found.equal, found.clear, found.clear_equal) == (4, 0, 4, 0)
    assert {row[1:] for row in found.differing} == {(CANDIDATE, BASE)}
    forward, back = found.losses
    assert forward is not None
    assert back is not None
    assert forward.mean == pytest.approx(0.25, abs=0.02)  # the candidate, where it takes 12.5
    assert back.mean == pytest.approx(0.25, abs=0.02)  # the fallback, where the candidate takes 8
    assert f"{CANDIDATE} for {BASE}" in forward.where


def test_a_cell_near_the_margin_is_no_clear_difference(make: Make) -> None:
    # the margin is 5 % on the CPU: one study is just past it, the other just short of it
    found = compared(make(10 / 1.068, 4), make(10 / 1.035, 5))
    assert found.decided == 4
    assert found.clear == 0


def test_a_cell_that_waits_for_a_second_process_is_not_decided(fast: Path) -> None:
    with opened(str(fast)) as database:
        study = judged(database, str(fast), "generic", space=TINY)
        waiting = replace(
            study.cells[0].outcome, decision=Decision(None, Reason.UNPROVEN, "a second process must agree")
        )
        other = replace(study, cells=(replace(study.cells[0], outcome=waiting), *study.cells[1:]))
        found = agreement.compare(other, study)
    assert (found.common, found.decided, found.equal, found.clear) == (4, 3, 3, 3)
    assert found.waiting == (1, 0)
    assert "1 / 0" in agreement.report(found, agreement.NEAR)


def test_opposite_proofs_are_told(fast: Path, make: Make) -> None:
    found = compared(fast, make(8.0, 6, unsafe=True))
    assert {row[1:] for row in found.opposite} == {(CANDIDATE, Status.SAFE.value, Status.UNSAFE.value)}
    assert len(found.opposite) == 4


def test_the_agreement_command(fast: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--space", str(TINY)]
    assert agreement.main([str(fast), str(fast), *flags]) == 0
    out = capsys.readouterr().out
    assert "4 of 4 (100.0%)" in out and "0 of 8 (0.0%)" in out
    assert agreement.main([str(fast), str(tmp_path / "none.db"), *flags]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def halves(path: Path) -> tuple[list[regret.Half], JudgedStudy]:
    with opened(str(path)) as database:
        study = judged(database, str(path), "generic", space=TINY)
        return regret.halved(study, "graph"), study


def test_regret_of_rules_on_a_plain_truth(fast: Path) -> None:
    found, study = halves(fast)
    assert len(found) == 8  # 4 cells, both ways
    assert all(len({r.index % 2 for r in half.seen}) == 1 for half in found)
    by_rule = {name: regret.regret_of(found, choices) for name, choices in regret.rules(found, study).items()}
    for name in ("table", "always decode", "smallest median", "nearest bucket"):
        each = by_rule[name]
        assert each is not None
        assert (each.mean, each.wrong) == (0.0, 0.0)
    lost = by_rule["always fallback"]
    assert lost is not None
    assert lost.mean == pytest.approx(0.25, abs=0.02)
    assert lost.wrong == 1.0
    assert by_rule["always fa2"] is None


def test_medians_of_the_half_that_judges_are_not_those_that_chose(fast: Path) -> None:
    found, _ = halves(fast)
    one, other = found[0], found[1]
    assert one.cell == other.cell
    assert one.truth != other.truth
    assert {r.index for r in one.seen} & {r.index for r in other.seen} == set()


def test_a_bucket_is_taken_over_by_its_neighbours(fast: Path) -> None:
    found, _ = halves(fast)
    chosen = regret.buckets(found, one_q_len=False)
    assert set(chosen) == set(range(len(found)))
    assert set(chosen.values()) == {CANDIDATE}


def test_an_oracle_judges_by_its_own_times(
    fast: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read(str(fast))
    rounds = tmp_path / "oracle.jsonl"
    lines: list[dict[str, object]] = [{"kind": "header", "device": "x", "seed": 1}]
    for item in found.items[:2]:
        turned = []
        for each in item.rounds:
            data = each.to_dict()
            data["run_us"] = {name: {BASE: 5.0, CANDIDATE: 6.0}[name] for name in data["run_us"]}
            turned.append(data)
        cell = item.cell.to_dict()
        lines.append(
            {"kind": "rounds", "process": 0, "cell": cell, "chunk": 4, "start_up": [], "rounds": turned}
        )
    rounds.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert regret.main([str(fast), "--space", str(TINY), "--oracle", str(rounds)]) == 0
    out = capsys.readouterr().out
    assert "2 cells" in out
    assert (
        next(line for line in out.splitlines() if line.startswith("| table |")).split("|")[4].strip()
        == "20.00%"
    )
    assert regret.main([str(fast), "--space", str(TINY), "--objective", "none"]) == 1
    assert "--objective none" in capsys.readouterr().err


def test_the_file_of_a_source_is_left_as_it_is(fast: Path, tmp_path: Path) -> None:
    for path in fast.parent.glob(f"{fast.name}*"):  # with what is not yet in the file itself
        shutil.copy(path, tmp_path)
    copy = tmp_path / fast.name
    before = copy.read_bytes()
    with opened(str(copy)) as database:
        assert study_of(database, str(copy)).space_name
        own = study_of(database, str(copy)).id
        assert study_of(database, f"{copy}#{own[:6]}").id == own
        with pytest.raises(RecordedError, match="one study is wanted"):
            study_of(database, f"{copy}#none")
    with opened(f"{copy}#{own}") as database:
        assert len(judged(database, f"{copy}#{own}", "generic", space=TINY).cells) == 4
    assert copy.read_bytes() == before
