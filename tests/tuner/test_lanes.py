"""Several lanes: scripted ones for who does what, real children for who lives."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from autotune.domain.cell import Column
from autotune.domain.decision import Decision, Reason
from autotune.domain.verdict import UnprovenReason
from autotune.hardware.collect import collect
from autotune.hardware.devices import cpus
from autotune.routes import registry as route_registry
from autotune.space.engine import load_engine
from autotune.space.grid import expand
from autotune.space.space import load_file
from autotune.store.errors import StoreError
from autotune.store.records import TrialState
from autotune.tuner.baton import Baton, BatonWorker, HaltedError
from autotune.tuner.crew import Crew
from autotune.tuner.deadline import Deadline
from autotune.tuner.lanes import Lane, leading
from autotune.tuner.run import OpenedRun
from autotune.tuner.strategy import Exhaustive, Pick, anything
from autotune.tuner.target import Target
from autotune.tuner.tuner import Tuner
from autotune.worker.base import Broken, Completed, Outcome, WorkerError
from autotune.worker.presence import PresenceJob
from autotune.worker.worker import Worker
from tests.console import SINGLE, TINY
from tests.tuner.scripted import ScriptedWorker, opened, routes, sweep
from tests.tuner.scripted_lanes import Heard, LaneWorker, lane, together

# Whoever waits for another lane waits so long at most: a busy machine is no failure.
PATIENCE_S = 60.0


def within(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S), "it never came to that"


def decisions(run: OpenedRun) -> dict[str, Decision]:
    return run.repository.decisions(run.study)


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert [each for each in threading.enumerate() if each not in before and "autotune" in each.name] == []


def test_lanes_work_at_the_same_time_and_answer_as_one_does(tmp_path: Path) -> None:
    times = {"fast": 5.0, "slow": 20.0}
    with opened(tmp_path / "one", routes("fast", "slow")) as run:
        sweep(run, ScriptedWorker(times=times))
        alone = decisions(run)
        proofs = {
            (p.column.id, p.cell_id, p.route, p.result.check)
            for p in run.repository.all_proofs(run.fingerprint)
        }
    meeting = threading.Barrier(2)
    met: list[int] = []

    def meet() -> None:
        if not met:
            meeting.wait(PATIENCE_S)  # nobody gets here unless both children work at once
            met.append(1)

    workers = [LaneWorker(times=times, before_time=meet) for _ in range(2)]
    with opened(tmp_path / "two", routes("fast", "slow")) as run:
        progress = together(run, *workers)
        assert (progress.settled, progress.now, progress.devices) == (4, 4, ("cuda:0", "cuda:1"))
        assert {key: value.route for key, value in decisions(run).items()} == {
            key: value.route for key, value in alone.items()
        }
        assert all(decision.route == "fast" for decision in decisions(run).values())
        found = [
            (p.column.id, p.cell_id, p.route, p.result.check)
            for p in run.repository.all_proofs(run.fingerprint)
        ]
        assert set(found) == proofs
        states = Counter(trial.state for trial in run.repository.trials(run.study).values())
        assert states == {TrialState.COMPLETE: 4}
        trials = run.queue._study.get_trials()
        assert sorted(trial.params["cell"] for trial in trials) == [0, 1, 2, 3]
        assert {trial.user_attrs["device"] for trial in trials} == {"cuda:0", "cuda:1"}
        assert run.queue._study.user_attrs["devices"] == ["cuda:0", "cuda:1"]
    assert all(worker.cells for worker in workers)
    every = [cell for worker in workers for cell in worker.cells]
    assert len(set(every)) == 4
    launched = Counter(each for worker in workers for each in worker.columns)
    assert max(launched.values()) == 1  # no lane repeats what another has proven


def test_the_store_has_one_writer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, routes("fast")) as run:
        inside: list[str] = []
        append = run.repository.append_rounds

        def watched(*args: Any, **more: Any) -> Any:
            inside.append(threading.current_thread().name)
            assert len(inside) == 1, inside
            time.sleep(0.002)
            found = append(*args, **more)
            inside.pop()
            return found

        monkeypatch.setattr(run.repository, "append_rounds", watched)
        assert together(run, *(LaneWorker(times={"fast": 5.0}) for _ in range(4))).settled == 4


def test_a_column_is_kept_from_the_others_only_while_it_is_proven(tmp_path: Path) -> None:
    nothing_free = threading.Event()

    class Watched(Exhaustive):
        def take(self, free: Callable[[Column], bool] = anything) -> Pick | None:
            pick = super().take(free)
            if pick is None:
                nothing_free.set()
            return pick

    # two columns: with one lane more than that, one is left without
    proving = [LaneWorker(before_proof=lambda: within(nothing_free)) for _ in range(3)]
    with opened(tmp_path, routes("fast")) as run:
        strategy = Watched(run.queue, run.settled, 1, 3)
        assert together(run, *proving, strategy=strategy).settled == 4
    launched = Counter(each for worker in proving for each in worker.columns)
    assert max(launched.values()) == 1


@pytest.mark.parametrize("ends", ["proof", "time", "no child"])
def test_the_cells_of_a_lost_device_go_to_the_others(tmp_path: Path, ends: str) -> None:
    gone = threading.Event()

    def die() -> None:
        dying.lost = True
        gone.set()
        if ends == "no child":
            raise WorkerError("the child process cannot be started: no memory")

    dying, living, heard = LaneWorker(), LaneWorker(times={"fast": 5.0}), Heard()
    if ends == "proof":
        dying.before_proof = die
    else:
        dying.before_time = die
    living.before_time = lambda: within(gone)  # so the other one gets something to lose
    with opened(tmp_path, routes("fast")) as run:
        progress = together(run, living, dying, heard=heard)
        assert progress.settled == 4
        assert {decision.route for decision in decisions(run).values()} == {"fast"}
        states = {trial.state for trial in run.repository.trials(run.study).values()}
        assert states == {TrialState.COMPLETE}
        complete = [trial for trial in run.queue._study.get_trials() if trial.state.name == "COMPLETE"]
        assert sorted(trial.params["cell"] for trial in complete) == [0, 1, 2, 3]
    (line,) = heard.warnings
    why = "the child process cannot be started: no memory" if ends == "no child" else "does not answer"
    assert line.startswith("cuda:1: ")
    assert why in line
    assert line.endswith("; the others go on")


def test_a_child_that_is_lost_is_not_a_lost_device(tmp_path: Path) -> None:
    """kill -9 of a lane's child while it times: the device answers, the lane goes on."""

    class Once(LaneWorker):
        killed = False

        def _end(self) -> Outcome | None:
            if self.killed:
                return None
            self.killed = True
            return Broken(UnprovenReason.INFRASTRUCTURE, "SIGKILL: killed from outside", "fast: timing")

    heard = Heard()
    with opened(tmp_path, routes("fast")) as run:
        first = together(run, Once(), Once(), heard=heard)
        assert heard.warnings == []
        assert first.settled == 4 - sum(1 for _ in run.repository.pending(run.study))
        assert together(run, LaneWorker(), LaneWorker()).settled == 4


def test_no_lane_is_left(tmp_path: Path) -> None:
    heard = Heard()
    with opened(tmp_path, routes("fast")) as run:
        with pytest.raises(WorkerError) as caught:
            together(run, LaneWorker(lost=True), LaneWorker(lost=True), heard=heard)
        assert decisions(run) == {}
        assert len(heard.warnings) == 1
        line = str(caught.value)
        assert line.startswith("no device is left; cuda:")
        assert "cuda:0: it does not answer" in line
        assert "cuda:1: it does not answer" in line
        assert together(run, LaneWorker(), LaneWorker()).settled == 4


def test_an_error_in_one_lane_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, routes("fast")) as run:
        append = run.repository.append_rounds
        calls: list[int] = []

        def full(*args: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise StoreError("disk full")
            return append(*args, **more)

        monkeypatch.setattr(run.repository, "append_rounds", full)
        with pytest.raises(StoreError, match="disk full"):
            together(run, LaneWorker(), LaneWorker())
        monkeypatch.undo()
        assert {trial.state for trial in run.repository.trials(run.study).values()} <= {
            TrialState.COMPLETE,
            TrialState.INTERRUPTED,
        }
        assert together(run, LaneWorker(), LaneWorker(), LaneWorker()).settled == 4


def test_a_spent_budget_ends_all(tmp_path: Path) -> None:
    with opened(tmp_path, routes("fast")) as run:
        progress = together(run, LaneWorker(), LaneWorker(), seconds=0.0)
        assert progress.settled == 0
        assert progress.out_of_budget


def test_a_lane_ends_at_its_next_chance() -> None:
    baton = Baton()
    worker = LaneWorker()
    with baton:
        baton.halt()
        with pytest.raises(HaltedError):
            BatonWorker(cast(Worker, worker), baton).run(PresenceJob("cpu"), timeout_s=1.0)
    with baton:
        pass  # it was given back


def test_the_first_lane_that_answers_leads() -> None:
    warned: list[str] = []
    lanes = [
        lane("cuda:0", LaneWorker(lost=True)),
        lane("cuda:1", LaneWorker()),
        lane("cuda:2", LaneWorker(lost=True)),
    ]
    assert [each.name for each in leading(lanes, "cuda", warned.append)] == ["cuda:1", "cuda:2"]
    assert warned == ["cuda:0: it does not answer: no device; the run goes on without it"]
    with pytest.raises(WorkerError, match="no device can be used; cuda:0: it does not answer: no device"):
        leading(lanes[:1], "cuda", warned.append)


def test_what_a_lane_gives_back_is_proven_again(tmp_path: Path) -> None:
    with opened(tmp_path, routes("fast")) as run:
        strategy = Exhaustive(run.queue, run.settled, 2)
        strategy.start(run.cells, frozenset(), None)
        pick = strategy.take()
        assert pick is not None
        assert len(pick.prove) == 4
        run.queue.abandon(pick.item, TrialState.FAILED)
        strategy.give_back(pick, None)
        again = strategy.take()
        assert again == pick
        strategy.give_back(again, Decision(None, Reason.NOT_FASTER))
        rest = strategy.take()
        assert rest is not None
        assert {item.item.cell for item in rest.prove} == {item.cell for item in run.cells[1:]}


def test_takers_share_what_is_left_to_prove(tmp_path: Path) -> None:
    with opened(tmp_path, routes("fast")) as run:
        strategy = Exhaustive(run.queue, run.settled, 6, 2)
        strategy.start(run.cells, frozenset(), None)
        first = strategy.take()
        assert first is not None
        columns = {item.item.cell.column for item in first.prove}
        assert len(columns) == 1
        second = strategy.take(lambda column: column not in columns)
        assert second is not None
        assert {item.item.cell.column for item in second.prove}.isdisjoint(columns)
        assert strategy.take(lambda column: False) is None


def real(stack: ExitStack, folder: Path, space: Path = TINY) -> OpenedRun:
    facts = collect("cpu", threads=1)
    place = Target(expand(load_file(space), load_engine("generic")), facts, "cpu", "host_mmap", seed=5)
    return stack.enter_context(opened(folder, route_registry.routes("cpu"), place))


def real_lane(stack: ExitStack, name: str) -> Lane:
    prover = stack.enter_context(Worker(name))
    return Lane(name, Crew([prover]), stack.enter_context(Worker(name, guard_allocations=False)))


@pytest.mark.skipif(len(cpus()) < 2, reason="needs two cores")
def test_real_lanes_of_which_one_has_no_device(tmp_path: Path) -> None:
    """Its children die while they start; the other settles the study."""
    with ExitStack() as stack:
        run = real(stack, tmp_path, SINGLE)
        lanes = [real_lane(stack, "cpu:0"), real_lane(stack, "cpu:4096")]
        heard = Heard()
        progress = Tuner(run, lanes[0].crew, lanes[0].timer, heard, Deadline(None), None, lanes=lanes).sweep()
        assert progress.settled == len(run.cells)
        (line,) = heard.warnings
        assert line.startswith("cpu:4096: the child process died while starting: ValueError: no core 4096")


@pytest.mark.skipif(len(cpus()) < 2, reason="needs two cores")
def test_real_lanes_are_interrupted(tmp_path: Path) -> None:
    """A signal in the main thread ends children and threads; nothing that they were at is recorded."""

    class EndedError(Exception):
        pass

    def end(*_: object) -> None:
        raise EndedError

    before = signal.signal(signal.SIGUSR1, end)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGUSR1, before)
        run = real(stack, tmp_path)
        lanes = [real_lane(stack, "cpu:0"), real_lane(stack, "cpu:1")]
        main = threading.main_thread()

        class Ending(Heard):
            def proof(self, *_: object) -> None:
                assert main.ident is not None
                if not self.warnings:
                    self.warnings.append("once")
                    signal.pthread_kill(main.ident, signal.SIGUSR1)

        tuner = Tuner(run, lanes[0].crew, lanes[0].timer, Ending(), Deadline(None), None, lanes=lanes)
        with pytest.raises(EndedError):
            tuner.sweep()
        states = [trial.state for trial in run.repository.trials(run.study).values()]
        assert states
        assert TrialState.RUNNING not in states
        assert {trial.lost for trial in run.repository.trials(run.study).values()} == {0}
        unproven = [
            proof for proof in run.repository.all_proofs(run.fingerprint) if proof.result.reason is not None
        ]
        assert unproven == []
        for index, each in enumerate(lanes):
            assert each.timer.run(PresenceJob("cpu"), timeout_s=60.0) == Completed(str(cpus()[index]))
