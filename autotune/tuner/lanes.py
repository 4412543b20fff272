"""Several devices at work for one study: a lane each, a thread each, one strategy that hands out the cells.

A lane is a device with its own proving crew and its own timing child. Its thread runs the tuner's code while
it holds the baton (:mod:`autotune.tuner.baton`) and lets the others run while its children work. Rounds of a
cell come from the lane that took it. Proofs belong to the fingerprint, which all lanes share: a column is
proven by one lane, meanwhile kept from the others, and open to all afterwards.

A lane whose device stops answering ends: its cell goes back, and the others go on. The call fails with the
last lane.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.domain.verdict import CheckStatus
from autotune.tuner.baton import Baton, BatonCrew, BatonWorker, HaltedError
from autotune.tuner.crew import KILL_EVERY_S, kill_child
from autotune.worker.base import Completed, WorkerError
from autotune.worker.presence import trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autotune.domain.cell import Column
    from autotune.domain.decision import Decision
    from autotune.tuner.crew import Crew, Row
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.strategy import Pick, Strategy
    from autotune.worker.base import Job, Outcome, Runs
    from autotune.worker.worker import Worker


@dataclass(frozen=True)
class Lane:
    """One device.

    Attributes:
        name: ``cuda:1``; said to people.
        crew: proves on it.
        timer: times on it, with no proof beside it.
        presence: what its children answer when they are asked which device they have
            (:class:`autotune.worker.presence.PresenceJob`); None: anything.
        scout: times on it for the search alone; None: no strategy looks.
    """

    name: str
    crew: Crew
    timer: Worker
    presence: str | None = None
    scout: Worker | None = None

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Every worker of the device."""
        return (*self.crew.workers, self.timer, *(() if self.scout is None else (self.scout,)))


def leading(lanes: Sequence[Lane], device: str, warn: Callable[[str], None]) -> list[Lane]:
    """The lanes from the first whose device answers: that one makes the pilot and the self-test.

    Args:
        device: ``cpu`` or ``cuda``.
        warn: told in one line of each lane that is left out.

    Raises:
        WorkerError: none answers.
    """
    left = list(lanes)
    said = []
    while left and (why := trouble(left[0].timer, device, left[0].presence)) is not None:
        said.append(f"{left.pop(0).name}: {why}")
        if left:
            warn(f"{said[-1]}; the run goes on without it")
    if not left:
        raise WorkerError(f"no device can be used; {'; '.join(said)}")
    return left


@dataclass
class _Noted:
    """A worker that notes whether a job ended in any way but well."""

    worker: Runs
    ill: bool = False

    def run(
        self,
        job: Job,
        *,
        timeout_s: float,
        on_event: Callable[[object], object] | None = None,
        step_timeout_s: float | None = None,
    ) -> Outcome:
        outcome = self.worker.run(job, timeout_s=timeout_s, on_event=on_event, step_timeout_s=step_timeout_s)
        self.ill = self.ill or not isinstance(outcome, Completed)
        return outcome


class LaneAtWork:
    """A lane for the length of one sweep: what proves and times on it hands the baton on while it waits."""

    def __init__(self, lane: Lane, baton: Baton) -> None:
        self.name = lane.name
        self._lane = lane
        self._baton = baton
        self._asked = BatonWorker(lane.timer, baton)
        self.timer = _Noted(self._asked)
        self.scout = None if lane.scout is None else _Noted(BatonWorker(lane.scout, baton))
        self.crew: Crew = BatonCrew(lane.crew, baton, self._note)
        self.claimed: frozenset[str] = frozenset()  # columns that it proves, by id

    def _note(self, row: Row) -> None:
        self.timer.ill = self.timer.ill or row.result.status in (CheckStatus.FAILED, CheckStatus.UNPROVEN)

    def trouble(self, device: str) -> str | None:
        """Why the device is not there any more; it is asked only after something went wrong on it."""
        noted = [each for each in (self.timer, self.scout) if each is not None and each.ill]
        if not noted:
            return None
        for each in noted:
            each.ill = False
        return self.ask(device)

    def proven(self) -> None:
        """The proofs that it had claimed are stored: their columns are open to all."""
        self.claimed = frozenset()
        self._baton.ring()

    def ask(self, device: str) -> str | None:
        """Why the device cannot be used, in one line; None if it can."""
        return trouble(self._asked, device, self._lane.presence)


@dataclass
class _Shared:
    """What the lanes of a sweep know of each other; the baton's holder reads and changes it."""

    busy: int = 0
    lost: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)


class Lanes:
    """The lanes of one sweep.

    Args:
        device: ``cpu`` or ``cuda``.
        warn: told in one line of each lane that is lost while others are left.
    """

    def __init__(
        self, lanes: Sequence[Lane], device: str, deadline: Deadline, warn: Callable[[str], None]
    ) -> None:
        self.baton = Baton()
        self.at_work = tuple(LaneAtWork(lane, self.baton) for lane in lanes)
        self._lanes = tuple(lanes)
        self._device = device
        self._deadline = deadline
        self._warn = warn
        self._shared = _Shared()

    @property
    def left(self) -> Lane:
        """The first lane that was not lost, for what only one device does after the others ended."""
        return next(lane for lane in self._lanes if lane.name not in self._shared.gone)

    def work(self, strategy: Strategy, settle: Callable[[LaneAtWork, Pick], Decision | None]) -> None:
        """Settle what the strategy hands out, until it has no more or the deadline passes.

        An interruption, or an error in any lane, ends all of them: the children are killed, and what they
        were doing is not recorded.

        Args:
            settle: settles a pick on a lane, with the baton held. It calls :meth:`LaneAtWork.proven` once the
                pick's proofs are stored.

        Raises:
            WorkerError: no lane is left.
        """
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run(hand: LaneAtWork) -> None:
            try:
                with self.baton:
                    self._run(hand, strategy, settle)
                ended.put(None)
            except BaseException as error:
                ended.put(error)

        threads = [
            threading.Thread(target=run, args=(hand,), name=f"autotune {hand.name}", daemon=True)
            for hand in self.at_work
        ]
        self._shared = _Shared(busy=len(threads))
        left = len(threads)
        try:
            for thread in threads:
                thread.start()
            while left:
                error = ended.get()
                left -= 1
                if error is not None and not isinstance(error, HaltedError):
                    raise error
        finally:
            self.baton.halt()
            while alive := [thread for thread in threads if thread.is_alive()]:
                if left:
                    self._interrupt()
                for thread in alive:
                    thread.join(KILL_EVERY_S)
        if len(self._shared.lost) == len(self.at_work):
            raise WorkerError(f"no device is left; {'; '.join(self._shared.lost)}")

    def _interrupt(self) -> None:
        for lane in self._lanes:
            for worker in lane.workers:
                kill_child(worker)
        with self.baton:
            self.baton.ring()

    def _run(
        self, hand: LaneAtWork, strategy: Strategy, settle: Callable[[LaneAtWork, Pick], Decision | None]
    ) -> None:
        """One lane's loop; holds the baton."""
        shared = self._shared
        try:
            if (why := hand.ask(self._device)) is not None:
                self._lose(hand, why)
                return
            while not self._deadline.passed:
                self.baton.check()
                pick = strategy.take(lambda column: self._free(hand, column))
                if pick is None:
                    if shared.busy == 1:  # nobody else could open a column or give a cell back
                        return
                    shared.busy -= 1
                    try:
                        self.baton.wait()
                    finally:
                        shared.busy += 1
                    continue
                hand.claimed = frozenset(each.item.cell.column.id for each in pick.prove)
                if not self._settle(hand, pick, strategy, settle):
                    return
        finally:
            hand.claimed = frozenset()
            shared.busy -= 1
            self.baton.ring()

    def _settle(
        self,
        hand: LaneAtWork,
        pick: Pick,
        strategy: Strategy,
        settle: Callable[[LaneAtWork, Pick], Decision | None],
    ) -> bool:
        """Settle a pick and tell the strategy; False: the lane's device is lost, and that is told too."""
        decision: Decision | None = None
        try:
            decision = settle(hand, pick)
            why = hand.trouble(self._device)
        except WorkerError as error:
            why = str(error)
        if why is None:
            strategy.told(pick.item, decision)
            self.baton.ring()
            return True
        strategy.give_back(pick, decision)
        self._lose(hand, why)
        return False

    def _lose(self, hand: LaneAtWork, why: str) -> None:
        said = f"{hand.name}: {why}"
        self._shared.lost.append(said)
        self._shared.gone.add(hand.name)
        if len(self._shared.lost) < len(self.at_work):
            self._warn(f"{said}; the others go on")

    def _free(self, hand: LaneAtWork, column: Column) -> bool:
        """Whether no other lane is proving the column at this moment."""
        return not any(column.id in other.claimed for other in self.at_work if other is not hand)
