"""The two jobs of a study: prove one check of one route, and time routes against each other.

Jobs hold names and plain data. Routes, checks and arenas are looked up in the child, so that the parent
never loads a kernel library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from autotune.domain.route_name import EMULATED, PLANTED
from autotune.domain.verdict import (
    CheckResult,
    CheckStatus,
    FailureKind,
    Requirement,
    UnprovenReason,
)
from autotune.worker.base import Broken, Completed, Failed, JobError, Outcome
from autotune.worker.failure import OPENING, is_closing, is_opening

if TYPE_CHECKING:
    from autotune.bench.record import Finding, Round
    from autotune.checks.base import MakeArena
    from autotune.routes.base import Route
    from autotune.worker.base import Channel
    from autotune.worker.worker import Worker

# Padding that a faulting route is granted in a second run; an engine must attest it (`tail_padding_512`).
TAIL_PADDING = 512
# One check of one column takes seconds; this only ends what no step watchdog sees.
PROVE_TIMEOUT_S = 300.0
# A child that died after other routes' jobs died of one of them or of its own: so often is it asked alone.
ALONE_RUNS = 3
PLANTED_CUDA = "planted-cuda-"
PLANTED_XQA = "planted-xqa-"
PLANTED_LIVE = "planted-live-"


def child_route(name: str) -> Route:
    """The route called ``name``; no registry lists ``planted-`` ones, which are wrong on purpose, nor
    ``emulated-`` ones, which run without their GPU.

    Raises:
        ValueError: there is none.
    """
    from autotune.routes import registry

    if name.startswith(PLANTED_XQA):
        from autotune.routes.planted_xqa import PlantedXqa

        return PlantedXqa(name)
    if name.startswith(PLANTED_LIVE):
        from autotune.routes.planted_live import PlantedLive

        return PlantedLive(name)
    if name.startswith(PLANTED_CUDA):
        from autotune.routes.planted_cuda import PlantedCuda

        return PlantedCuda(name)
    if name.startswith(PLANTED):
        from autotune.routes.planted import Planted

        return Planted(name)
    if name.startswith(EMULATED):
        from autotune.routes.flashinfer.emulation.route import emulated

        return emulated(name)
    return registry.get(name)


def arena_factory(kind: str, device: str, slack: int) -> MakeArena:
    """How a check opens its arenas: with ``slack`` bytes of padding after each operand."""
    from autotune.worker.padding import open_padded

    return partial(open_padded, kind, device, padding=slack)


def _is_launch(text: str) -> bool:
    return not (is_opening(text) or is_closing(text))


@dataclass(frozen=True)
class ProveJob:
    """One check of one route in one column. The value is a ``CheckResult`` as a dict, and its ``route``.

    Attributes:
        column, facts: ``Column.to_dict()``, ``Facts.to_dict()``.
        kv_lens, pad_value, slack: see :class:`autotune.checks.base.Trial`.
    """

    route: str
    check: str
    column: dict[str, Any]
    facts: dict[str, Any]
    kv_lens: tuple[int, ...]
    seed: int
    device: str
    arena_kind: str
    pad_value: int = 1
    slack: int = 0

    @property
    def owners(self) -> tuple[str, ...]:
        """Whose code it runs."""
        return (self.route,)

    def spends(self, value: Any) -> bool:
        """A child that had no memory left for a check may have none for the next."""
        return isinstance(value, dict) and value.get("reason") == UnprovenReason.OUT_OF_MEMORY.value

    def __call__(self, channel: Channel) -> dict[str, Any]:
        """Look everything up, then run the check."""
        from autotune.checks import registry
        from autotune.checks.base import Trial
        from autotune.domain.cell import Column
        from autotune.domain.fingerprint import Facts

        check = registry.get(self.check)
        trial = Trial(
            route=child_route(self.route),
            column=Column.from_dict(self.column),
            facts=Facts.from_dict(self.facts),
            kv_lens=self.kv_lens,
            seed=self.seed,
            device=self.device,
            make_arena=arena_factory(self.arena_kind, self.device, self.slack),
            launched=lambda text: channel.step(text, launch=_is_launch(text)),
            pad_value=self.pad_value,
            slack=self.slack,
        )
        if reason := check.applies(trial):
            row = CheckResult(
                check.name,
                check.version,
                CheckStatus.NOT_APPLICABLE,
                self.seed,
                detail=reason,
                slack=self.slack,
            )
            return self._answer(row)
        return self._answer(check.run(trial))

    def _answer(self, row: CheckResult) -> dict[str, Any]:
        return {**row.to_dict(), "route": self.route}


def prove(
    worker: Worker, job: ProveJob, *, timeout_s: float = PROVE_TIMEOUT_S, step_timeout_s: float | None = None
) -> CheckResult:
    """Run ``job`` and make its row, also if the child died of it.

    A fault that 512 bytes of padding would explain is run again with them: a kernel that then passes reads
    past its operands' ends within what an engine can promise, and its row says that it needs that promise.
    Where the site of the fault is known, it must lie within those bytes. Where it is not (a CUDA fault has
    no address), a kernel that strays at random could pass the second run by luck: a third one, without
    padding, must fault again.

    A death in a child that had run other routes before may be theirs, unless it is located in this route's
    operands: it counts once it comes again in a child of the route's own. If it does not, nobody is accused
    and nothing is proven: ``unclear``.

    Raises:
        WorkerError: no child can be had.
    """
    padded = replace(job, slack=TAIL_PADDING)
    outcome = worker.run(job, timeout_s=timeout_s, step_timeout_s=step_timeout_s)
    if isinstance(outcome, Failed) and outcome.after:
        outcome = _alone(worker, job, outcome, timeout_s, step_timeout_s)
    first = row_of(job, outcome)
    if first.kind is not FailureKind.ILLEGAL_ACCESS or job.slack or job.arena_kind == "plain":
        return first
    site = outcome.fault if isinstance(outcome, Failed) else None
    if site is not None and not (site.offset is not None and 0 <= site.offset < TAIL_PADDING):
        return first
    second = run_check(worker, padded, timeout_s=timeout_s, step_timeout_s=step_timeout_s)
    launches = first.launches + second.launches
    # a fault seen once is a fault, whatever other runs could or could not show
    if second.status is not CheckStatus.PASSED:
        ended = second.kind or second.reason or second.status
        detail = f"{first.detail}; with {TAIL_PADDING} bytes of padding: {ended.value}"
        return replace(first, launches=launches, detail=detail)
    if site is None:
        third = run_check(worker, job, timeout_s=timeout_s, step_timeout_s=step_timeout_s)
        launches += third.launches
        if third.kind is not FailureKind.ILLEGAL_ACCESS:
            again = third.kind or third.reason or third.status
            detail = (
                f"{first.detail}; passes with {TAIL_PADDING} bytes of padding, but a third run, without, "
                f"ended otherwise ({again.value}): nothing shows that the padding helped"
            )
            return replace(first, launches=launches, detail=detail)
    return replace(
        second,
        launches=launches,
        requires=tuple(sorted({*second.requires, Requirement.TAIL_PADDING_512.value})),
        detail=f"passes with {TAIL_PADDING} bytes after each operand; without: {first.detail}",
    )


def _alone(
    worker: Worker, job: ProveJob, death: Failed, timeout_s: float, step_timeout_s: float | None
) -> Outcome:
    """What ``job`` comes to in a child that has run nothing but it; the last one ended in ``death``."""
    for _ in range(ALONE_RUNS):
        outcome = worker.run(job, timeout_s=timeout_s, step_timeout_s=step_timeout_s)
        if row_of(job, outcome).status is not CheckStatus.PASSED:
            return outcome
    detail = (
        f"{death.detail}, after {', '.join(death.after)} in the same process; alone it passed {ALONE_RUNS} "
        f"times: either may be to blame"
    )
    return Broken(UnprovenReason.UNCLEAR, detail, death.step, death.steps)


def run_check(
    worker: Worker, job: ProveJob, *, timeout_s: float = PROVE_TIMEOUT_S, step_timeout_s: float | None = None
) -> CheckResult:
    """One run of ``job``, with the padding it asks for, as a row.

    Raises:
        WorkerError: no child can be had.
    """
    return row_of(job, worker.run(job, timeout_s=timeout_s, step_timeout_s=step_timeout_s))


def row_of(job: ProveJob, outcome: Outcome) -> CheckResult:
    """The proof row that an outcome amounts to.

    An exception of our own code accuses nobody; what a route raises the check reports itself.
    """
    if isinstance(outcome, Completed):
        found, detail = _answered(job, outcome.value)
        if found is not None:
            return found
        outcome = Broken(UnprovenReason.INFRASTRUCTURE, detail, "")
    from autotune.checks import registry

    try:
        version = registry.get(job.check).version
    except ValueError:
        version = 0  # the child said which checks there are; the row carries its message
    row = partial(
        CheckResult,
        job.check,
        version,
        seed=job.seed,
        launches=outcome.steps,
        slack=job.slack,
    )
    where = f" ({outcome.step})" if outcome.step else ""
    if isinstance(outcome, Failed):
        return row(status=CheckStatus.FAILED, kind=outcome.kind, detail=f"{outcome.detail}{where}")
    if isinstance(outcome, Broken):
        return row(status=CheckStatus.UNPROVEN, reason=outcome.reason, detail=f"{outcome.detail}{where}")
    assert isinstance(outcome, JobError)
    return row(
        status=CheckStatus.UNPROVEN,
        reason=UnprovenReason.INFRASTRUCTURE,
        detail=" ".join(f"{outcome.exc_type}: {outcome.message}{where}".split()),
    )


def _answered(job: ProveJob, value: Any) -> tuple[CheckResult | None, str]:
    """The row that a child answered with; or None, and why it is none."""
    try:
        fields = dict(value)
        route = fields.pop("route", job.route)
        found = CheckResult.from_dict(fields)
    except (TypeError, ValueError, KeyError) as error:
        return None, f"the child answered with what is no row: {type(error).__name__}: {error}"
    if (route, found.check, found.seed) != (job.route, job.check, job.seed):
        return None, f"the child answered for {route} in {found.check}, seed {found.seed}"
    return found, ""


@dataclass(frozen=True)
class TimeJob:
    """Rounds of one cell. Every chunk of rounds goes to the parent as ``{"rounds": [...]}``, which stores it
    and answers whether (or with which routes) to go on; see :func:`autotune.bench.rounds.time_cell`. A step's
    text begins with the running route's name and a colon; opening its session is a step of its own, since
    no exception there accuses the route.

    Attributes:
        routes: names of the routes to time, all of them proven.
        cell, facts: ``Cell.to_dict()``, ``Facts.to_dict()``.
        settings: fields of ``RoundSettings``.
        first_round: rounds that are stored already.
    """

    routes: tuple[str, ...]
    cell: dict[str, Any]
    facts: dict[str, Any]
    seed: int
    device: str
    arena_kind: str
    settings: dict[str, Any]
    first_round: int = 0

    @property
    def owners(self) -> tuple[str, ...]:
        """Whose code it runs."""
        return self.routes

    def __call__(self, channel: Channel) -> int | Finding:
        """Run rounds until the parent has enough.

        Returns:
            The number of rounds reported; or what was found wrong with a route, which :func:`timed` reads.
        """
        from autotune.bench.record import RoundSettings
        from autotune.bench.rounds import TimingFindingError, time_cell
        from autotune.domain.cell import Cell
        from autotune.domain.fingerprint import Facts

        cell = Cell.from_dict(self.cell)
        texts = [
            *(f"{name}: timing {cell}" for name in self.routes),
            *(f"{name}{OPENING}timing {cell}" for name in self.routes),
        ]
        places = {name: place for place, name in enumerate(self.routes)}
        enter = channel.among(texts)
        opening = False
        reported = 0

        def phase(text: str) -> None:
            nonlocal opening
            opening = text.startswith("open ")

        def launching(name: str) -> None:
            place = places.get(name)
            enter(place if place is None or not opening else place + len(places))

        def go_on(rounds: list[Round]) -> Any:
            nonlocal enter, reported
            reported += len(rounds)
            answer = channel.ask({"rounds": [round_.to_dict() for round_ in rounds]})
            enter = channel.among(texts)  # the watchdog's time begins anew
            return answer

        try:
            time_cell(
                [child_route(name) for name in self.routes],
                cell,
                Facts.from_dict(self.facts),
                seed=self.seed,
                device=self.device,
                make_arena=arena_factory(self.arena_kind, self.device, 0),
                settings=RoundSettings(**self.settings),
                first_round=self.first_round,
                go_on=go_on,
                launching=launching,
                phase=phase,
            )
        except TimingFindingError as error:
            return error.finding
        return reported


def timed(outcome: Outcome) -> Outcome:
    """How a :class:`TimeJob` ended: what it found wrong with a route is that route's failure.

    As for a death, the step begins with the route's name and a colon.
    """
    from autotune.bench.record import Finding

    if isinstance(outcome, Completed) and isinstance(outcome.value, Finding):
        found = outcome.value
        return Failed(found.kind, found.detail, f"{found.route}: timing")
    return outcome
