"""Times the proven routes of a cell until its decision needs no more rounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from autotune.bench.record import CHUNK, MIN_GROUP_MS, Round, RoundSettings
from autotune.domain.verdict import CheckResult, CheckStatus, UnprovenReason
from autotune.tuner.book import TIMING, TIMING_VERSION
from autotune.tuner.prover import seed_of
from autotune.tuner.standing import most_left
from autotune.tuner.trouble import explain
from autotune.worker.base import Broken, Failed, JobError, ProtocolError
from autotune.worker.jobs import TimeJob, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from autotune.domain.cell import Cell
    from autotune.routes.base import Route
    from autotune.store.records import Study
    from autotune.store.repository import Repository
    from autotune.tuner.book import ProofBook
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.judge import Judge
    from autotune.tuner.standing import Evidence
    from autotune.tuner.target import Target
    from autotune.worker.base import Outcome, Runs

# A cell takes a second or two; this only ends what the step watchdog does not see.
TIMEOUT_S = 300.0
# No call takes less or more: a ratio of two such times is positive and finite.
LEAST_US, MOST_US = 1e-6, 1e12


@dataclass(frozen=True)
class Ended:
    """How one child's rounds of a cell ended; what went wrong is stored.

    Attributes:
        over: there is no use in asking for more now.
        died: the route that died or was wrong, if one was.
        again: it may have been what an earlier cell's routes left behind: the next child is this cell's own.
    """

    over: bool = False
    died: str | None = None
    again: bool = False


class Racer:
    """Rounds of one study. Each chunk is committed before anything is concluded from it."""

    def __init__(
        self,
        worker: Runs,
        target: Target,
        repository: Repository,
        study: Study,
        book: ProofBook,
        judges: Sequence[Judge],
        deadline: Deadline,
    ) -> None:
        self._worker = worker
        self._target = target
        self._repository = repository
        self._study = study
        self._book = book
        self._judges = tuple(judges)
        self._deadline = deadline

    def race(
        self, cell: Cell, evidences: Sequence[Evidence], routes: Mapping[str, Route]
    ) -> tuple[Evidence, str | None]:
        """Run rounds until no judge wants one, or the deadline passes.

        Args:
            evidences: what is known of the cell, its stored rounds included, one an engine
                as the judges are: the same rounds must answer for all of them.

        Returns:
            The first evidence with the new rounds, and the route that died or was wrong, if one was. That is
            stored as a failed ``timing`` row: the caller asks for verdicts again, and races those left.
        """
        seed = seed_of(self._study.seed, cell.id, TIMING)
        evidence = evidences[0]
        while live := self._plan(cell, evidences, evidence.rounds):
            if self._deadline.passed:
                break
            rounds = list(evidence.rounds)
            most = self._judges[0].test.max_rounds
            ended = self.time(
                cell,
                live,
                routes,
                seed=seed,
                first=len(rounds),
                most=len(rounds) + most_left(evidences, live, rounds, most),
                keep=self._keep(cell, evidences, rounds),
            )
            evidence = replace(evidence, rounds=tuple(rounds))
            if ended.over:
                return evidence, ended.died
        return evidence, None

    def time(
        self,
        cell: Cell,
        live: tuple[str, ...],
        routes: Mapping[str, Route],
        *,
        seed: int,
        first: int,
        most: int,
        keep: Callable[[list[Round], list[Any]], tuple[str, ...] | bool],
    ) -> Ended:
        """Rounds ``first`` up to ``most`` of a cell in the worker's child, whatever they are for.

        A route that dies or is wrong is stored as a failed ``timing`` row, what is nobody's fault as an
        unproven one.

        Args:
            live: names, the fallback first.
            keep: gets each report, as rounds and as they came; it must commit them before it answers what is
                next: these routes, or nothing. Routes that the child does not have open any more, or never
                had, are left to another child.
        """
        seen, open_ones = first, set(live)

        def on_event(payload: Any) -> tuple[str, ...] | bool:
            nonlocal seen, open_ones
            reported = read_rounds(payload, seen)
            seen += len(reported)
            following = keep(reported, payload["rounds"])
            if isinstance(following, tuple):
                if not open_ones.issuperset(following):
                    return False
                open_ones = set(following)
            return following

        device = self._target.facts.device
        settings = RoundSettings(min_group_ms=MIN_GROUP_MS[device], chunk=CHUNK[device], max_rounds=most)
        job = TimeJob(
            routes=live,
            cell=cell.to_dict(),
            facts=self._target.facts.to_dict(),
            seed=seed,
            device=self._target.device,
            arena_kind="plain",
            settings=asdict(settings),
            first_round=first,
        )
        outcome = self._run(job, on_event)
        if isinstance(outcome, Failed) and outcome.after:
            # what an earlier cell's routes left behind may have done it: again, in a child of this cell's
            self._note(cell, outcome, live, routes, seed)
            return Ended(again=True)
        if isinstance(outcome, Failed):
            return Ended(over=True, died=self._accuse(cell, outcome, live, routes, seed))
        if isinstance(outcome, (Broken, JobError)):
            self._note(cell, outcome, live, routes, seed)
            return Ended(over=True)
        return Ended(over=seen == first)

    def _run(self, job: TimeJob, on_event: Callable[[Any], Any]) -> Outcome:
        """Run ``job``; a report that makes no sense ends it, and accuses nobody."""
        try:
            return timed(self._worker.run(job, timeout_s=TIMEOUT_S, on_event=on_event))
        except ProtocolError as error:
            return Broken(UnprovenReason.INFRASTRUCTURE, str(error), "")

    def _plan(self, cell: Cell, evidences: Sequence[Evidence], rounds: Sequence[Round]) -> tuple[str, ...]:
        """Routes that the next round must time for any of the engines; () when none needs more."""
        wanted = (
            judge.wanted(cell, replace(evidence, rounds=tuple(rounds)))
            for judge, evidence in zip(self._judges, evidences, strict=True)
        )
        return tuple(dict.fromkeys(name for names in wanted for name in names))

    def _keep(
        self, cell: Cell, evidences: Sequence[Evidence], rounds: list[Round]
    ) -> Callable[[list[Round], list[Any]], tuple[str, ...] | bool]:
        """Commits a chunk, then answers with the routes that still need rounds; extends ``rounds``."""

        def keep(reported: list[Round], raw: list[Any]) -> tuple[str, ...] | bool:
            self._repository.append_rounds(self._study, cell, len(rounds), raw)
            rounds.extend(reported)
            self._judges[0].raced(cell)
            if self._deadline.passed:
                return False
            return self._plan(cell, evidences, rounds) or False

        return keep

    def _accuse(
        self, cell: Cell, outcome: Failed, live: tuple[str, ...], routes: Mapping[str, Route], seed: int
    ) -> str | None:
        """Store the death with the route that was running; None if it was none of them."""
        name = _running(outcome, live)
        if name is None:
            self._note(cell, outcome, live, routes, seed)
            return None
        result = CheckResult(
            TIMING,
            TIMING_VERSION,
            CheckStatus.FAILED,
            seed,
            kind=outcome.kind,
            detail=explain(outcome),
            launches=outcome.steps,
        )
        self._book.save(cell, routes[name], result, "")  # times are not reproduced by a command
        return name

    def _note(
        self,
        cell: Cell,
        outcome: Failed | Broken | JobError,
        live: tuple[str, ...],
        routes: Mapping[str, Route],
        seed: int,
    ) -> None:
        """Store why timing ended, with the route that was running or else the fallback.

        An unproven row: it accuses nobody, and keeps no verdict from being safe.
        """
        result = CheckResult(
            TIMING,
            TIMING_VERSION,
            CheckStatus.UNPROVEN,
            seed,
            reason=outcome.reason if isinstance(outcome, Broken) else UnprovenReason.INFRASTRUCTURE,
            detail=explain(outcome),
            launches=outcome.steps,
        )
        self._book.save(cell, routes[_running(outcome, live) or live[0]], result, "")
        if result.reason is not UnprovenReason.BUDGET:
            # Rounds that are lost only where a route was slow would bias the test: a cell has few losses.
            self._repository.lose_chunk(self._study, cell)


def read_rounds(payload: Any, first: int) -> list[Round]:
    """A report's rounds, of which the first must be round ``first``.

    Raises:
        ProtocolError: the child's memory, or what it sent, cannot be relied on.
    """
    try:
        found = [Round.from_dict(data) for data in payload["rounds"]]
        sound = [each.index for each in found] == list(range(first, first + len(found))) and all(
            all(LEAST_US <= us < MOST_US for us in (*each.run_us.values(), *each.host_us.values()))
            and all(0.0 <= us < MOST_US for us in each.prepare_us.values())
            for each in found
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ProtocolError(
            f"a report of rounds that cannot be read: {type(error).__name__}: {error}"
        ) from None
    if not (found and sound):
        raise ProtocolError(f"a report of rounds that does not go on with round {first}")
    return found


def _running(outcome: Failed | Broken | JobError, live: tuple[str, ...]) -> str | None:
    """The route in whose step the job ended."""
    return next((name for name in live if outcome.step.startswith(f"{name}: ")), None)
