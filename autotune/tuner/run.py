"""Opening a run: fingerprint, study, queue and book from a database; and the self-test before anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from autotune.bench.eprocess import SignTest, Unit
from autotune.bench.objective import paired_ratios
from autotune.domain.identity import stable_id
from autotune.prebuild.verify import require_selftest
from autotune.store.records import Fingerprint, Study, StudyCell, Timing
from autotune.store.repository import Repository
from autotune.tuner.book import ProofBook
from autotune.tuner.cell_rounds import CellRounds
from autotune.tuner.code_version import code_version
from autotune.tuner.cost import ranked
from autotune.tuner.judge import Judge
from autotune.tuner.lineup import Lineup, line_up
from autotune.tuner.objectives import STEP, Objectives
from autotune.tuner.recheck_book import RecheckBook
from autotune.tuner.selftest import SelfTest, chosen, run_selftest
from autotune.tuner.standing import progress_of

if TYPE_CHECKING:
    from autotune.domain.cell import Cell
    from autotune.routes.base import Route
    from autotune.store.database import Database
    from autotune.tuner.listener import Listener
    from autotune.tuner.pilot import Pilot
    from autotune.tuner.queue import TrialQueue
    from autotune.tuner.standing import Evidence
    from autotune.tuner.target import Target
    from autotune.worker.worker import Worker

# The chance that any "faster" of a table is false, at most.
ALPHA = 0.05
# On a shared CPU a route against itself spreads by 5 % (median) to 17 %: less than this is not worth a
# claim. On CUDA a kernel against itself stays within 2 % in one process. Floors: what differs between
# processes is measured in the run (bench/shift.py) and may ask for more.
MARGIN = {"cpu": 0.05, "cuda": 0.02}
# Rounds belong to no engine; which fallback they are held against is a matter of the table.
SHARED = "any"


@dataclass
class OpenedRun:
    """A study that is open, and locked if it was opened for tuning."""

    target: Target
    repository: Repository
    fingerprint: Fingerprint
    study: Study
    cells: tuple[StudyCell, ...]
    book: ProofBook
    test: SignTest
    judge: Judge
    rechecks: RecheckBook
    others: tuple[Judge, ...] = ()
    _queue: TrialQueue | None = None

    @property
    def judges(self) -> tuple[Judge, ...]:
        """One an engine, the run's own first."""
        return (self.judge, *self.others)

    def under(self, judge: Judge) -> OpenedRun:
        """The same stored rows, judged for another engine of this run."""
        return replace(self, target=judge.target, judge=judge, others=())

    def weigh(self, layers: int | None, hidden: float) -> None:
        """Let ``step`` count these layers (None: the models' own), and this share of ``prepare`` as hidden.

        Raises:
            ValueError: fewer than one layer, or a share outside 0..1.
        """
        for judge in self.judges:
            judge.weigh(layers, hidden)

    @property
    def queue(self) -> TrialQueue:
        """The Optuna side; only a run opened for tuning has one."""
        assert self._queue is not None
        return self._queue

    def settled(self, cell: Cell) -> bool:
        """Whether more work could change no engine's answer."""
        answers = [judge.settled(cell) for judge in self.judges]  # of each, while the rounds are at hand
        return all(answers)

    def waits(self, cell: Cell) -> str | None:
        """The first declared objective under which any engine's claim waits for a second process; None: none
        does, or the first process still owes the cell rounds."""
        answers = [judge.answers(cell) for judge in self.judges]
        if any(known.live for each in answers for known in each.values()):
            return None
        names = self.judge.objectives.names
        return next((name for name in names if any(each[name].second for each in answers)), None)

    def answers_first(self, cell: Cell) -> bool:
        """Whether the first declared objective, by which tables are written unless another is asked for, owes
        the cell no more proofs and no rounds of a first process, for any engine."""
        first = self.judge.objectives.first
        answers = [judge.known(cell, first) for judge in self.judges]
        return all(known.proven and not known.live for known in answers)

    def learn(self) -> None:
        """Have every cell's answers at hand: its rounds are decoded once for all engines."""
        for item in self.cells:
            for judge in self.judges:
                judge.known(item.cell)

    def save_timings(self, cell: Cell, evidence: Evidence) -> None:
        """Store what the rounds say about each route, for whoever reads the database.

        The counts are those of the first objective; the summary has the state of each.
        """
        names = dict.fromkeys(name for round_ in evidence.rounds for name in round_.order)
        objectives = self.judge.objectives
        rows = []
        for name in names:
            mine = [round_ for round_ in evidence.rounds if name in round_.run_us]
            seen = {
                each: paired_ratios(evidence.rounds, evidence.fallback, name, objective, self.test.unit)
                for each, objective in objectives.of(cell.column).items()
            }
            progress = {
                each: progress_of(
                    (evidence.fallback, name), ratios, evidence.rounds, self.judge.test_of(each)
                )
                for each, ratios in seen.items()
            }
            first = progress[objectives.first]
            fallback = name == evidence.fallback
            rows.append(
                Timing(
                    name,
                    rounds=len(mine) if fallback else first.n,
                    above=0 if fallback else first.above,
                    below=0 if fallback else first.below,
                    run_us=median(round_.run_us[name] for round_ in mine),
                    host_us=median(round_.host_us[name] for round_ in mine),
                    prepare_us=median(round_.prepare_us[name] for round_ in mine),
                    summary={
                        each: {"state": progress[each].state.value, "speedup": median(ratios)}
                        for each, ratios in seen.items()
                        if ratios and not fallback
                    },
                )
            )
        self.repository.save_timings(self.study, cell, rows)


def study_digest(target: Target, routes: Mapping[str, Route]) -> str:
    """What makes two runs the same study: cells, and the routes that race.

    Not the engine: engines that call the same cells share their rounds, and the number of claims counts
    each of them. One more route is one more chance of a false claim, so it starts a study of its own;
    proofs are bound to the fingerprint and are not run again. An installed route that supports none of the
    cells changes nothing. Where ``step`` is declared, the layers that it counts belong to the question.
    """
    names = {route.name for lineup in _lineups(target, routes) for route in lineup.runners}
    racing = sorted((name, routes[name].version) for name in names)
    asked: list[object] = [target.grid.digest, racing]
    if target.grid.whole is not None:  # the same cells by other flags are a study with another N
        asked.append(["picked of", target.grid.whole.digest])
    objectives = Objectives.of_grid(target.grid)
    if STEP in objectives.names:
        asked.append([objectives.layers(column) for column in target.grid.columns])
    return stable_id(asked, 16)


def multiplicity(target: Target, routes: Mapping[str, Route]) -> int:
    """N: every claim that the study could make. Cells x candidates x engines x objectives.

    Where single cells were picked of a grid, every claim of the whole grid: a cell's evidence is then
    measured by the same N as there, and two studies of it can be held against each other. Their taus are
    their own.
    """
    grid = target.grid.whole or target.grid
    whole = replace(target, grid=grid)
    candidates = max(len(lineup.candidates) for lineup in _lineups(whole, routes))
    return len(grid.cells) * max(candidates, 1) * len(grid.space.engines) * len(grid.space.objectives)


def _lineups(target: Target, routes: Mapping[str, Route]) -> Iterator[Lineup]:
    for column in target.grid.columns:
        yield line_up(column, routes, target.engine, target.arch, target.facts)


@contextlib.contextmanager
def open_run(
    database: Database,
    target: Target,
    routes: Mapping[str, Route],
    *,
    tuning: bool,
    pilot: Callable[[], Pilot] | None = None,
    margin: float | None = None,
    like: Study | None = None,
) -> Iterator[OpenedRun]:
    """Open the study of ``target``, creating it if this is its first run.

    Args:
        tuning: take the exclusive lock, open Optuna's side and end what a killed run left behind.
        pilot: run once, if the study is new, before it is created: it decides the unit of its test, which
            nothing changes afterwards. None: a round.
        margin: of a new study's claims; the device's in :data:`MARGIN` if None.
        like: a recorded study: objectives, margin, N and unit are those, so that a part of its cells is
            judged as all of them were.

    Raises:
        StoreError: the database cannot be used, or another run holds the study.
    """
    repository = Repository(database)
    fingerprint = repository.register_fingerprint(target.facts)
    space = target.grid.space
    digest = study_digest(target, routes)
    with contextlib.ExitStack() as stack:
        if tuning:
            stack.enter_context(database.lock(f"{space.gpu}-{digest}"))
        known = repository.find_study(fingerprint, space.gpu, digest, SHARED)
        piloted = pilot() if pilot is not None and known is None else None
        unit = known.unit if known is not None else (piloted.unit if piloted else Unit.ROUND).value
        study = repository.open_study(
            fingerprint,
            space_name=space.gpu,
            space_digest=digest,
            engine=SHARED,
            objectives=like.objectives if like else space.objectives,
            margin=like.margin if like else (MARGIN[target.facts.device] if margin is None else margin),
            multiplicity=like.multiplicity if like else multiplicity(target, routes),
            unit=like.unit if like else unit,
            seed=target.seed,
            code_version=code_version(),
        )
        queue = ranked(target.grid.cells, target.facts.device)
        repository.add_cells(study, [(item.cell, item.models, rank) for rank, item in enumerate(queue)])
        test = SignTest(study.margin, study.multiplicity, ALPHA, unit=Unit(study.unit))
        book = ProofBook(repository, fingerprint)
        cells = tuple(repository.cells(study))
        rechecks, rounds = RecheckBook(repository, study), CellRounds(repository, study)
        judge = Judge(target, routes, repository, study, book, test, rechecks, rounds)
        others = tuple(
            Judge(target.under(engine), routes, repository, study, book, test, rechecks, rounds)
            for engine in target.others
        )
        run = OpenedRun(target, repository, fingerprint, study, cells, book, test, judge, rechecks, others)
        if tuning:
            from autotune.tuner.queue import TrialQueue

            run._queue = TrialQueue(database, repository, study)
            run._queue.recover(cells, repository.decisions(study))
            if piloted is not None:
                run._queue.note("pilot", piloted.to_dict())
        yield run


def ensure_selftest(run: OpenedRun, worker: Worker, listener: Listener) -> SelfTest | None:
    """Show every check its planted faults, unless this very code on this very machine has seen them.

    It is run to its end whatever the deadline: half a self-test proves nothing, and a stored one serves
    every later call.

    Returns:
        The self-test, or None where a stored one counts.
    """
    stored = run.repository.selftest(run.fingerprint, code_version())
    if stored is not None and stored.passed:
        listener.selftest_reused(len(stored.results))
        return None
    require_selftest(run.target.facts)
    device = run.target.device
    listener.selftest_started(len(chosen(device)))
    test = run_selftest(
        worker,
        device,
        facts=run.target.facts,
        on_result=lambda result: listener.selftest_row(result.to_dict()),
    )
    run.repository.save_selftest(
        run.fingerprint, code_version(), passed=test.ok, results=[result.to_dict() for result in test.results]
    )
    listener.selftest_done(test.ok)
    return test
