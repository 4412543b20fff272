"""Second processes: what is drawn, what tau does to a study, near claims, deaths and kills."""

from __future__ import annotations

import contextlib
import io
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from autotune.bench.record import Round
from autotune.domain.cell import Cell
from autotune.domain.decision import Decision, Reason
from autotune.domain.fingerprint import Facts, Scalar
from autotune.domain.verdict import FailureKind, Status, UnprovenReason
from autotune.report.summary import summary_text
from autotune.table.dump import dump_table
from autotune.table.load import load_table
from autotune.tuner import sample
from autotune.tuner.book import TIMING
from autotune.tuner.crew import Crew
from autotune.tuner.deadline import Deadline
from autotune.tuner.listener import Silent
from autotune.tuner.publish import accusations, build, decide_all, publish
from autotune.tuner.racer import Ended
from autotune.tuner.recheck import Rechecker
from autotune.tuner.run import OpenedRun
from autotune.tuner.sample import ROUNDS, draw, due
from autotune.tuner.strategy import Exhaustive
from autotune.tuner.tally import Tally
from autotune.tuner.target import Target
from autotune.tuner.tuner import Progress, Tuner
from autotune.worker.base import Broken, Failed, Outcome
from autotune.worker.jobs import ProveJob, TimeJob
from autotune.worker.worker import Worker
from tests.console import SIX, TINY
from tests.tuner.scripted import ScriptedWorker, opened, routes, sweep, target

FAST = routes("fast")
HARDWARE: dict[str, Scalar] = {"name": "Test CPU", "cores": 2, "threads": 1, "isa": ""}
FACTS = Facts("cpu", HARDWARE, {"torch": "2", "torch_commit": ""})
MANY = """
schema: "autotune/search-space/1"
gpu: "cpu"
device:
  kind: "cpu"
engines: ["generic"]
models:
- {model: "llama-3.1-70b", attn_tp: [8]}
dtypes: ["fp32"]
q_len: [1, 2]
batch_size: [1, 2]
kv_len: [16, 32]
max_context: 32
objectives: ["graph"]
"""


def cells_of(space: Path) -> Target:
    """A space on a machine that does not exist and has every fact that a table needs."""
    return replace(target(space=space), facts=FACTS)


DRAWN = 6
SIX_CELLS = cells_of(SIX)

# How many times the fallback's speed a route has in a round: of a cell's id, whether its process is a second
# one, and the round.
Speed = Callable[[str, bool, int], float]


@dataclass
class SecondWorker(ScriptedWorker):
    """Tells the processes of a cell apart: routes run at 10 / ``speed`` us, the fallback at 10.

    Attributes:
        ends: how a re-timing ends after its first chunk, in turn; None: well.
        begun: (cell, rounds at most) of each re-timing, and ``renewed`` at its beginning.
    """

    speed: Speed = lambda cell, again, index: 2.0
    ends: list[Outcome | None] = field(default_factory=list)
    begun: list[tuple[str, int, int]] = field(default_factory=list)
    job: TimeJob | None = None

    @property
    def again(self) -> bool:
        return self.job is not None and self.job.settings["max_rounds"] < 128

    def run(self, job: ProveJob | TimeJob, **more: Any) -> Outcome:
        self.job = job if isinstance(job, TimeJob) else None
        if isinstance(job, TimeJob) and self.again:
            cell = Cell.from_dict(job.cell).id
            self.begun.append((cell, job.settings["max_rounds"], self.renewed))
        return super().run(job, **more)

    def _end(self) -> Outcome | None:
        return self.ends.pop(0) if self.again and self.ends else None

    def _round(self, index: int, live: tuple[str, ...]) -> Round:
        assert self.job is not None
        cell = Cell.from_dict(self.job.cell).id
        fallback, *others = live
        times = {fallback: 10.0} | {name: 10.0 / self.speed(cell, self.again, index) for name in others}
        return Round(index, live, times, times, dict.fromkeys(live, 1.0), dict.fromkeys(live, 1))


def shifted(first: float, by: float) -> Speed:
    """The same in every cell."""
    return lambda cell, again, index: first * (1.0 + by) if again else first


def reasons(run: OpenedRun) -> set[Reason]:
    return {cell.decision.reason for cell in decide_all(run)}


def stored(run: OpenedRun) -> dict[str, list[tuple[int, bool, int]]]:
    """(process, sampled, rounds) by cell."""
    found = run.repository.rechecks(run.study)
    return {key: [(it.process, it.sampled, len(it.rounds)) for it in mine] for key, mine in found.items()}


def test_six_cells_measure_tau_and_the_table_says_it(tmp_path: Path) -> None:
    worker = SecondWorker(speed=shifted(2.0, 0.01))
    with opened(tmp_path, FAST, SIX_CELLS) as run:
        progress = sweep(run, worker)
        assert (progress.cells, progress.settled, progress.now) == (6, 6, 6)
        assert run.judge.tau() == 0.01
        assert reasons(run) == {Reason.PROVEN_FASTER}
        # on the CPU each in a child of its own, and none in one that had timed it before
        assert stored(run) == {item.cell.id: [(1, True, ROUNDS)] for item in run.cells}
        assert sorted(renewed for _, _, renewed in worker.begun) == [1, 2, 3, 4, 5, 6]
        table, _ = build(run)
        assert (table.policy.margin, table.policy.tau) == (0.05, 0.01)
        (tmp_path / "t.yaml").write_bytes(dump_table(table))
        assert load_table(tmp_path / "t.yaml").policy == table.policy
        again = SecondWorker(speed=shifted(2.0, 0.01))
        assert sweep(run, again).now == 0
        assert again.timed == [] and again.renewed == 0
    with opened(tmp_path, FAST, SIX_CELLS) as run:  # from the rows alone
        assert run.judge.tau() == 0.01


def test_tau_is_that_of_the_objective_as_it_is_weighed(tmp_path: Path) -> None:
    space = tmp_path / "both.yaml"
    space.write_text(SIX.read_text().replace('objectives: ["graph"]', 'objectives: ["graph", "step"]'))
    with opened(tmp_path / "db", FAST, cells_of(space)) as run:
        sweep(run, SecondWorker(speed=shifted(2.0, -0.1)))
        models = run.judge.tau("step")
        run.weigh(1, 0.0)
        weighed = run.judge.tau("step")
        assert models is not None and weighed is not None and weighed < models
        run.weigh(None, 0.0)
        assert run.judge.tau("step") == models


def test_routes_that_the_engine_cannot_deploy_do_not_move_tau(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, routes("fast", "wild"), SIX_CELLS) as run:
        sweep(run, SecondWorker(speed=shifted(2.0, 0.01)))
        assert run.judge.tau() == 0.01
        real = run.judge.lineup
        monkeypatch.setattr(run.judge, "_taus_of", -1)
        monkeypatch.setattr(run.judge, "lineup", lambda column: replace(real(column), deployable=frozenset()))
        assert run.judge.tau() is None


def test_fewer_than_five_cells_leave_it_unknown_and_every_claim_as_it_was(tmp_path: Path) -> None:
    worker = SecondWorker(speed=shifted(1.06, -0.2))
    with opened(tmp_path, FAST, cells_of(TINY)) as run:
        assert sweep(run, worker).settled == 4
        assert worker.begun == []  # four cells would be timed for nothing
        assert run.judge.tau() is None
        assert reasons(run) == {Reason.PROVEN_FASTER}
        policy = build(run)[0].policy
        assert (policy.margin, policy.tau, policy.shift) == (0.05, None, None)


def test_a_raised_margin_takes_claims_back(tmp_path: Path) -> None:
    with opened(tmp_path, FAST, SIX_CELLS) as run:
        progress = sweep(run, SecondWorker(speed=shifted(1.10, 0.04)))
        assert progress.settled == progress.now == 6
        assert run.judge.tau() == 0.0393  # log 1.04, rounded up
        assert reasons(run) == {Reason.NOT_FASTER}
        after = run.repository.decisions(run.study)
        assert {decision.reason for decision in after.values()} == {Reason.NOT_FASTER}
        assert build(run)[0].policy.margin == 0.1179
        timings = run.repository.timings(run.study, run.cells[0].cell)
        assert {row.route: row.summary for row in timings}["fast"]["graph"]["speedup"] == pytest.approx(1.1)


def test_no_cell_is_counted_twice(tmp_path: Path) -> None:
    """A cell that the raised margin opens again was told of when it was settled."""
    told: list[str] = []

    class Counting(Silent):
        def cell_done(self, cell: Cell, decision: Decision) -> None:
            told.append(cell.id)

        def rechecking(self, cells: int, why: str) -> None:
            told.append(f"{cells} again")

    worker = SecondWorker(speed=lambda cell, again, index: 1.175 if again else 1.13 if index % 4 else 1.10)
    with opened(tmp_path, FAST, SIX_CELLS) as run:
        workers = [cast(Worker, worker)]
        Tuner(run, Crew(workers), workers[0], Counting(), Deadline(None), None).sweep()
        assert len(run.repository.rounds(run.study, run.cells[0].cell)) > 16
        assert sorted(told) == sorted([*(item.cell.id for item in run.cells), "6 again"])


def test_what_claimed_at_the_floor_is_timed_on_under_the_raised_margin(tmp_path: Path) -> None:
    def speed(cell: str, again: bool, index: int) -> float:
        return 1.13 * 1.04 if again else 1.13 if index % 4 else 1.10

    worker = SecondWorker(speed=speed)
    with opened(tmp_path, FAST, SIX_CELLS) as run:
        assert sweep(run, worker).settled == 6
        tau = run.judge.tau()
        assert tau == 0.0393
        # 12 rounds claimed at 5 %; at 11.8 % a quarter of them is below, and it takes more
        assert all(len(run.repository.rounds(run.study, item.cell)) > 16 for item in run.cells)
        assert reasons(run) == {Reason.PROVEN_FASTER}
        for each in run.repository.decisions(run.study).values():
            assert each.speedup_low is not None and each.speedup_low > 1 + 3 * tau


def test_cells_that_only_another_objective_opens_again_come_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = tmp_path / "both.yaml"
    space.write_text(SIX.read_text().replace('objectives: ["graph"]', 'objectives: ["graph", "step"]'))
    with opened(tmp_path / "db", FAST, cells_of(space)) as run:
        worker = SecondWorker(speed=shifted(2.0, 0.01))
        sweep(run, worker)
        assert all(run.answers_first(item.cell) for item in run.cells)
        last = run.cells[-1].cell  # the dearest owes the tables an answer, and comes before the cheap ones
        handed: list[str] = []
        monkeypatch.setattr(
            Exhaustive, "start", lambda _, pending, *more: handed.extend(item.cell.id for item in pending)
        )
        monkeypatch.setattr(OpenedRun, "settled", lambda *_: False)
        real = run.judge.known
        owing = replace(real(last), live=frozenset({"ctx", "fast"}))
        monkeypatch.setattr(
            run.judge, "known", lambda cell, *more: owing if cell == last else real(cell, *more)
        )
        monkeypatch.setattr(Tuner, "_second", lambda *_: None)
        sweep(run, worker)
        assert handed == [last.id, *(it.cell.id for it in run.cells[:-1])]


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """8 cells: two more than are drawn here."""
    monkeypatch.setattr(sample, "CELLS", DRAWN)
    path = tmp_path / "many.yaml"
    path.write_text(MANY)
    return path


def test_what_tau_opens_again_is_timed_at_once(tmp_path: Path, many: Path) -> None:
    def speed(cell: str, again: bool, index: int) -> float:
        return 1.13 * 1.04 if again else 1.13 if index % 4 else 1.10

    told: list[str] = []

    class Watching(Silent):
        def cell_done(self, cell: Cell, decision: Decision) -> None:
            told.append("done")

        def cell_again(self, cell: Cell, decision: Decision) -> None:
            assert decision.reason is Reason.PROVEN_FASTER
            told.append("again")

    worker = cast(Worker, SecondWorker(speed=speed))
    with opened(tmp_path / "db", FAST, cells_of(many)) as run:
        Tuner(run, Crew([worker]), worker, Watching(), Deadline(None), None).sweep()
        # six claim at the floor and are drawn; at three of the tau that they give they do not claim any more
        assert told == ["done"] * 6 + ["again"] * 6 + ["done"] * 2
        assert reasons(run) == {Reason.PROVEN_FASTER}


def test_a_call_that_ends_with_cells_open_again_says_so(tmp_path: Path, many: Path) -> None:
    def speed(cell: str, again: bool, index: int) -> float:
        return 1.13 * 1.04 if again else 1.13 if index % 4 else 1.10

    worker = SecondWorker(speed=speed)
    with opened(tmp_path / "db", FAST, cells_of(many)) as run:
        first = sweep(run, worker, trials=5)
        assert (first.settled, first.now, first.reopened) == (5, 5, 0)

        class UntilTau(Deadline):
            @property
            def passed(self) -> bool:
                return run.judge.tau() is not None

        workers = [cast(Worker, worker)]
        second = Tuner(run, Crew(workers), workers[0], Silent(), UntilTau(None), None).sweep()
        assert run.judge.tau() is not None
        # the five of the first call claim no more, nor does the sixth, which was this call's
        assert (second.settled, second.now, second.reopened) == (0, 0, 5)
        assert "5 of earlier calls' are open again" in said(run, second, tmp_path)
        third = sweep(run, worker)
        assert (third.settled, third.now, third.reopened) == (8, 8, 0)


def said(run: OpenedRun, progress: Progress, folder: Path) -> str:
    """The summary's text, as a command prints it."""
    console = Console(file=io.StringIO(), width=1000)
    console.print(summary_text(run, progress, publish(run, folder)))
    return cast(io.StringIO, console.file).getvalue()


def near(odd: Callable[[str], float | None]) -> Speed:
    """1.10 at first, 2 % less in second processes: a margin of 6 %, near up to 12 %; odd cells otherwise."""

    def speed(cell: str, again: bool, index: int) -> float:
        return (odd(cell) or 1.078) if again else 1.10

    return speed


def test_near_claims_get_a_second_process_and_follow_it(tmp_path: Path, many: Path) -> None:
    place = cells_of(many)
    worker = SecondWorker()
    with opened(tmp_path / "db", FAST, place) as run:
        ids = [item.cell.id for item in run.cells]
        # which cells are drawn depends on no ratio: found out with others, in another database
        with opened(tmp_path / "first", FAST, place) as other:
            sweep(other, SecondWorker())
            drawn = set(stored(other))
        left = [cell for cell in ids if cell not in drawn]
        assert (len(drawn), len(left)) == (DRAWN, 2)
        refusing = left[0]
        worker.speed = near(lambda cell: 1.02 if cell == refusing else None)
        progress = sweep(run, worker)
        assert (progress.settled, progress.now) == (8, 8)
        assert run.judge.tau() == 0.0203
        processes = stored(run)
        assert {key for key, mine in processes.items() if mine[0][1]} == drawn
        # the drawn ones' own 16 rounds agree; the others have as many as their test needs
        assert all(processes[key] == [(1, True, ROUNDS)] for key in drawn)
        assert all(processes[key] == [(1, False, 8)] for key in left)
        answers = {each.cell.id: each.decision for each in decide_all(run)}
        assert [key for key, it in answers.items() if it.route is None] == [refusing]
        assert answers[refusing].reason is Reason.UNDECIDED
        assert "a second process did not agree: 0 of 7" in answers[refusing].detail
        assert all("a second process agreed after 7" in it.detail for it in answers.values() if it.route)
        assert answers == run.repository.decisions(run.study)
        assert run.repository.trials(run.study)[refusing].retries == 0


def test_where_a_second_process_refuses_the_next_best_gets_its_own(tmp_path: Path, many: Path) -> None:
    """In another child, which opens it; and with all of its rounds, whatever the first one used."""

    class Two(SecondWorker):
        def _round(self, index: int, live: tuple[str, ...]) -> Round:
            assert self.job is not None
            odd = self.again and Cell.from_dict(self.job.cell).id in left
            ratio = {"fast": 1.12, "other": 1.10}
            shift = 0.98 if self.again else 1.0
            straddling = 1.04 if index % 2 else 1.14
            times = {name: 10.0 / (straddling if odd else ratio[name] * shift) for name in live[1:]}
            times[live[0]] = 10.0
            return Round(index, live, times, times, dict.fromkeys(live, 1.0), dict.fromkeys(live, 1))

    place, known = cells_of(many), routes("fast", "other")
    left: set[str] = set()
    with opened(tmp_path / "first", known, place) as run:
        sweep(run, SecondWorker())
        left = {item.cell.id for item in run.cells} - set(stored(run))
    assert len(left) == 2
    with opened(tmp_path / "db", known, place) as run:
        worker = Two()
        assert sweep(run, worker).settled == 8
        processes = stored(run)
        assert all(processes[key] == [(1, False, 44), (2, False, 44)] for key in left)
        rows = [it.result for it in run.repository.all_proofs(run.fingerprint) if it.result.check == TIMING]
        assert rows == []
        assert {run.repository.trials(run.study)[key].lost for key in left} == {0}
        answers = run.repository.decisions(run.study)
        assert {answers[key].reason for key in left} == {Reason.UNDECIDED}


def test_what_waits_for_a_second_process_comes_before_new_cells(tmp_path: Path, many: Path) -> None:
    """A budget that ends in a large cell must not leave letters open that some rounds would have given."""
    place = cells_of(many)
    worker = SecondWorker(speed=near(lambda cell: None))
    killed_at_the_first_near_claim(tmp_path / "db", place, worker)
    with opened(tmp_path / "db", FAST, place) as run:
        drawn, waiting = stored(run), [it.cell.id for it in run.cells if run.waits(it.cell) == "graph"]
        assert len(waiting) == 2
    with contextlib.closing(sqlite3.connect(tmp_path / "db" / "sweep.db")) as rows, rows:
        for table in ("decision", "round_chunk", "recheck"):
            rows.execute(f"DELETE FROM {table} WHERE cell_id = ?", [min(drawn)])
    timed: list[str] = []

    class Noting(SecondWorker):
        def run(self, job: ProveJob | TimeJob, **more: Any) -> Outcome:
            if isinstance(job, TimeJob):
                timed.append(Cell.from_dict(job.cell).id)
            return super().run(job, **more)

    with opened(tmp_path / "db", FAST, place) as run:
        assert sweep(run, Noting(speed=near(lambda cell: None))).settled == 8
    assert set(timed[:2]) == set(waiting) and min(drawn) in timed[2:]


def test_a_second_process_that_cannot_start_is_tried_once_a_call(tmp_path: Path, many: Path) -> None:
    """A cell has a few losses in all: one call must not use them up on what stays as it is."""
    place = cells_of(many)
    killed_at_the_first_near_claim(tmp_path / "db", place, SecondWorker(speed=near(lambda cell: None)))

    class Unbuilt(SecondWorker):
        def run(self, job: ProveJob | TimeJob, **more: Any) -> Outcome:
            if isinstance(job, TimeJob) and job.settings["max_rounds"] < 128:
                return Broken(UnprovenReason.INFRASTRUCTURE, "its module is not built", "")
            return super().run(job, **more)

    with opened(tmp_path / "db", FAST, place) as run:
        spent = sweep(run, Unbuilt(speed=near(lambda cell: None)))
        assert (spent.settled, spent.waiting) == (6, {"graph": 2})
        trials = run.repository.trials(run.study)
        assert sorted(each.lost for each in trials.values()) == [0] * 6 + [1] * 2
        assert not any(each.given_up for each in trials.values())
    with opened(tmp_path / "db", FAST, place) as run:
        assert sweep(run, SecondWorker(speed=near(lambda cell: None))).settled == 8


class Killed(BaseException):
    """What ends a call as a kill does."""


def killed_at_the_first_near_claim(folder: Path, place: Target, worker: SecondWorker) -> None:
    """A call that dies in the first second process after the sample's, its chunk not committed."""

    def die() -> None:
        if worker.again and len(worker.begun) > DRAWN:
            raise Killed

    worker.on_chunk = die
    with opened(folder, FAST, place) as run, pytest.raises(Killed):
        sweep(run, worker)


def test_a_near_claim_is_open_until_its_second_process_has_run(tmp_path: Path, many: Path) -> None:
    place = cells_of(many)
    worker = SecondWorker(speed=near(lambda cell: None))
    killed_at_the_first_near_claim(tmp_path / "db", place, worker)
    with opened(tmp_path / "db", FAST, place) as run:
        waiting = [it.decision for it in decide_all(run) if it.decision.reason is Reason.UNPROVEN]
        assert len(waiting) == 2
        assert all("a second process must agree" in it.detail for it in waiting)
        table, _ = build(run)
        letters = "".join(row.letters for entry in table.entries for row in entry.routes.rows)
        assert letters.count("?") == 2
        # what a call without time leaves is counted as open
        spent = sweep(run, SecondWorker(), seconds=1e-9)
        assert (spent.settled, spent.now, spent.waiting) == (6, 0, {"graph": 2})
        tally = Tally.of(run, run.repository.decisions(run.study))  # as an export counts
        assert (len(tally.settled), tally.by_objective) == (6, {"graph": 2})
        again = SecondWorker(speed=near(lambda cell: None))
        progress = sweep(run, again)
        assert (progress.settled, progress.now, progress.waiting) == (8, 2, {})
        assert len(again.begun) == 2 and again.proved == []
        assert reasons(run) == {Reason.PROVEN_FASTER}


def test_one_that_waits_under_another_objective_only_is_counted_so(tmp_path: Path, many: Path) -> None:
    """At both ends of a call, though its decision, by the first objective, is final."""

    class Step(SecondWorker):
        """``fast`` runs twice as fast, and its preparation makes a step 1.10 times as fast, then 1.078."""

        def _round(self, index: int, live: tuple[str, ...]) -> Round:
            one = super()._round(index, live)
            prepare = 343.0 if self.again else 328.0
            return replace(one, prepare_us={name: prepare if name == "fast" else 1.0 for name in live})

    many.write_text(MANY.replace('objectives: ["graph"]', 'objectives: ["graph", "step"]'))
    place = cells_of(many)
    killed_at_the_first_near_claim(tmp_path / "db", place, Step())
    with opened(tmp_path / "db", FAST, place) as run:
        started: list[int] = []

        class Told(Silent):
            def started(self, cells: int, done: int, budget_s: float | None) -> None:
                started.append(done)

        timer = cast(Worker, Step())
        spent = Tuner(run, Crew([timer]), timer, Told(), Deadline(1e-9), None).sweep()
        assert reasons(run) == {Reason.PROVEN_FASTER}
        assert (started, spent.settled, spent.now, spent.waiting) == ([6], 6, 0, {"step": 2})
        progress = sweep(run, Step())
        assert (progress.settled, progress.now, progress.waiting) == (8, 2, {})


@dataclass
class Child:
    """Counts fresh children and the cells that each times, in turn."""

    served: list[list[str]] = field(default_factory=list)

    def recycle(self) -> None:
        self.served.append([])

    def time(self, cell: Cell, *args: Any, **more: Any) -> Ended:
        self.served[-1].append(cell.id)
        return Ended()


@pytest.fixture
def twenty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[OpenedRun, Rechecker, Child]]:
    """20 cells on what calls itself a GPU, each of which a second process may time."""
    path = tmp_path / "twenty.yaml"
    path.write_text(MANY.replace("batch_size: [1, 2]", "batch_size: [1, 2, 3, 4, 5]"))
    with opened(tmp_path, FAST, cells_of(path)) as run:
        run.target = replace(run.target, facts=replace(run.target.facts, device="cuda"))
        child = Child()
        recheck = Rechecker(run, cast(Any, child), cast(Any, child), Silent(), Deadline(None), {})
        monkeypatch.setattr(recheck, "_second", lambda cell, evidences: ("torch-sdpa", "fast"))
        yield run, recheck, child


def test_claims_that_wait_under_the_first_objective_come_first(
    twenty: tuple[OpenedRun, Rechecker, Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, recheck, child = twenty
    cells = [item.cell for item in run.cells]
    under = {cell.id: (None, "step", "graph")[i % 3] for i, cell in enumerate(cells)}
    monkeypatch.setattr(OpenedRun, "waits", lambda self, cell: under[cell.id])
    assert recheck.agree(cells)
    order = [cell for served in child.served for cell in served]
    assert order == [
        *(key for key in under if under[key] == "graph"),
        *(k for k in under if under[k] == "step"),
    ]
    under |= dict.fromkeys(under, None)
    assert not recheck.agree(cells)


def test_more_cells_share_a_child_that_must_agree_than_one_of_the_sample(
    twenty: tuple[OpenedRun, Rechecker, Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, recheck, child = twenty
    cells = [item.cell for item in run.cells]
    monkeypatch.setattr(OpenedRun, "waits", lambda self, cell: "graph")
    assert recheck.agree(cells)
    assert [len(served) for served in child.served] == [16, 4]
    child.served.clear()
    monkeypatch.setattr(recheck, "_draw", lambda count: cells)
    monkeypatch.setattr(recheck, "_raced", lambda cell: ("torch-sdpa", "fast"))
    recheck._timed = {cell.id: cell for cell in cells}
    recheck.sample(last=True)
    assert [len(served) for served in child.served] == [4, 4, 4, 4, 4]


@pytest.mark.parametrize("chunk", [2, 5, 25])
def test_killed_after_any_chunk_it_ends_as_if_it_had_not_been(tmp_path: Path, chunk: int) -> None:
    speed = shifted(1.10, -0.02)
    with opened(tmp_path / "whole", FAST, SIX_CELLS) as run:
        sweep(run, SecondWorker(speed=speed))
        wanted, tau = run.repository.decisions(run.study), run.judge.tau()
    worker = SecondWorker(speed=speed)
    seen = 0

    def die() -> None:  # the chunk before is committed, nothing was concluded from it
        nonlocal seen
        seen += worker.again
        if seen == chunk and worker.again:
            raise Killed

    worker.on_chunk = die
    with opened(tmp_path / "db", FAST, SIX_CELLS) as run:
        if chunk <= 24:
            with pytest.raises(Killed):
                sweep(run, worker)
        else:
            sweep(run, worker)  # 24 chunks are all there are
        assert sum(len(it.rounds) for mine in run.repository.rechecks(run.study).values() for it in mine) == (
            4 * min(chunk - 1, 24)
        )
    with opened(tmp_path / "db", FAST, SIX_CELLS) as run:
        sweep(run, SecondWorker(speed=speed))
        assert run.repository.decisions(run.study) == wanted
        assert run.judge.tau() == tau == 0.0203
        for mine in stored(run).values():
            # a child that was cut short is followed by another, under the next number
            assert [process for process, _, _ in mine] == list(range(1, len(mine) + 1))
            assert mine[-1][2] == ROUNDS
        assert len(stored(run)) == 6


def test_a_route_that_dies_in_a_second_process_is_accused(tmp_path: Path) -> None:
    died = Failed(FailureKind.ILLEGAL_ACCESS, "SIGSEGV", "fast: timing", steps=5)
    worker = SecondWorker(ends=[died])
    with opened(tmp_path, FAST, SIX_CELLS) as run:
        progress = sweep(run, worker)
        assert progress.settled == 6
        (row,) = [each for each in accusations(run) if each.route == "fast"]
        assert row.kind == "illegal_access" and row.detail.startswith(f"{TIMING}: ")
        dead = {item.cell.id for item in run.cells if str(item.cell.column) == row.cell}
        assert len(dead) == 2
        answers = run.repository.decisions(run.study)
        assert {answers[key].reason for key in dead} == {Reason.CANDIDATE_UNSAFE}
        assert {answers[key].reason for key in answers if key not in dead} == {Reason.PROVEN_FASTER}
        # the column's other cell was not timed again: its route is unsafe there too
        assert len(worker.begun) == 5
        assert run.judge.tau() is None


def test_a_death_that_may_be_an_earlier_cells_is_asked_again_alone(tmp_path: Path) -> None:
    unsure = Failed(FailureKind.CRASH, "SIGABRT", "fast: timing", steps=5, after=("other",))
    worker = SecondWorker(ends=[unsure])
    with opened(tmp_path, FAST, SIX_CELLS) as run:
        assert sweep(run, worker).settled == 6
        assert accusations(run) == ()
        first = worker.begun[0][0]
        assert stored(run)[first] == [(1, True, 4), (2, True, ROUNDS)]
        assert run.repository.trials(run.study)[first].lost == 1
        assert run.judge.tau() == 0.0001
        assert run.book.verdict(FAST["fast"], run.cells[0].cell.column, "cpu").status is Status.SAFE


def test_a_child_that_is_lost_leaves_its_cell_to_the_next_call(tmp_path: Path) -> None:
    lost = Broken(UnprovenReason.OUT_OF_MEMORY, "no memory", "fast: timing")
    worker = SecondWorker(ends=[lost])
    with opened(tmp_path, FAST, SIX_CELLS) as run:
        assert sweep(run, worker).settled == 6
        assert len(worker.begun) == 6  # not tried again at once
        assert run.judge.tau() == 0.0001  # five are enough
        sweep(run, SecondWorker())
        assert sorted(len(mine) for mine in stored(run).values()) == [1, 1, 1, 1, 1, 2]


def test_tau_is_had_as_soon_as_enough_cells_are_timed(tmp_path: Path, many: Path) -> None:
    with opened(tmp_path / "db", FAST, cells_of(many)) as run:
        worker = SecondWorker(speed=shifted(2.0, 0.01))
        sweep(run, worker, trials=DRAWN - 1)
        assert worker.begun == [] and run.judge.tau() is None
        sweep(run, worker, trials=1)  # by the count of both calls
        assert len({cell for cell, _, _ in worker.begun}) == len(worker.begun) == DRAWN
        assert run.judge.tau() == 0.01
        sweep(run, worker)
        assert len(worker.begun) == DRAWN


def test_when_cells_are_due() -> None:
    assert [due(n, last=False) for n in (0, 23, 24, 47, 48, 96, 192, 384, 5000)] == [
        *(0, 0, 8, 8, 12, 16, 20, 24, 24)
    ]
    assert [due(n, last=True) for n in (4, 5, 24, 2000)] == [0, 5, 24, 24]


def test_what_is_drawn_is_spread_and_seeded(tmp_path: Path) -> None:
    space = MANY.replace("batch_size: [1, 2]", "batch_size: [1, 2, 3, 4, 5]").replace(
        "[16, 32]", "[16, 24, 32]"
    )
    (tmp_path / "more.yaml").write_text(space)
    cells = [item.cell for item in cells_of(tmp_path / "more.yaml").grid.cells]
    assert len(cells) == 30

    def drawn(seed: int, count: int) -> list[Cell]:
        found: list[Cell] = []
        for _ in range(count):
            cell = draw(seed, found, cells)
            assert cell is not None
            found.append(cell)
        return found

    ten = drawn(7, 10)
    assert len(set(ten)) == 10
    assert {cell.column.batch_size for cell in ten} == {1, 2, 3, 4, 5}
    assert {cell.column.q_len for cell in ten} == {1, 2}
    assert {cell.kv_high for cell in ten} == {16, 24, 32}
    counts = [sum(cell.column.batch_size == size for cell in ten) for size in range(1, 6)]
    assert counts == [2] * 5
    assert ten == drawn(7, 12)[:10] and ten != drawn(8, 10)
    assert draw(7, cells, cells) is None
    # whatever order they were timed in
    assert draw(7, ten, cells[::-1]) == draw(7, ten, cells)
