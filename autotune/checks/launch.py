"""What every check shares: open a session in guarded memory, launch, and judge what came back.

A check's ``run`` hands :func:`conduct` a body that makes launches through a :class:`Stage`; the first finding
ends the check. In the order in which they are looked for, because the earlier one explains the later:

``out_of_bounds_write``  canary bytes around an operand have changed
``unwritten_output``     an element of ``out`` still holds the poison
``nan_leak``             a non-finite element that the kernel wrote itself
``wrong_output``         an error above the bound of ``checks.oracle``

A route that refuses the capacity by its contract is ``refused``. What an exception says, and of whom, is in
:mod:`autotune.checks.blame`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from zlib import crc32

import torch

from autotune.arena.base import ArenaError, Placement
from autotune.arena.nvfp4 import interleaves_v_scales
from autotune.arena.operands import Operands, Recipe, build, capacity_of, pool_pages
from autotune.checks import oracle
from autotune.checks.blame import (
    FindingError,
    OperandsError,
    UnfitError,
    calling,
    is_out_of_memory,
)
from autotune.checks.contents import Withheld
from autotune.checks.poison import POISON_BITS, poison, poisoned
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, UnprovenReason
from autotune.routes.arithmetic import Arithmetic
from autotune.routes.base import Need
from autotune.routes.contract import ContractError, Level, check_step

if TYPE_CHECKING:
    from autotune.arena.base import Arena
    from autotune.checks.base import Check, Trial
    from autotune.checks.workspace import Sizes
    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Capacity, Route, Session


def arithmetic_of(route: Route, column: Column, facts: Facts) -> Arithmetic:
    """What ``route`` declares for ``column``, or fp32 where it declares nothing."""
    declared = getattr(route, "arithmetic", None)
    if callable(declared):
        declared = declared(column, facts)
    return declared if isinstance(declared, Arithmetic) else Arithmetic()


@dataclass
class Tally:
    """Launches examined and the largest error seen, over all placements of a check."""

    launches: int = 0
    worst_error: float | None = None

    def add(self, error: float) -> None:
        """Count an error of a launch."""
        self.worst_error = error if self.worst_error is None else max(self.worst_error, error)


@dataclass
class Opened:
    """A session of the route in an arena, and the launches made with it."""

    stage: Stage
    arena: Arena
    session: Session
    capacity: Capacity

    def build(self, recipe: Recipe, *, pool: Arena | None = None) -> Operands:
        """Operands of ``recipe`` in this arena; host lengths only for routes that ask for them.

        Args:
            pool: where the KV pool lies, if not in this arena.
        """
        trial = self.stage.trial
        recipe = self.stage.as_stored(recipe)
        operands = build(self.arena, trial.column, recipe, trial.device, pool=pool)
        if Need.HOST_KV_LENS not in trial.route.needs:
            operands.step.host_kv_lens = None
        return operands

    def fire(
        self,
        operands: Operands,
        label: str,
        patterns: dict[int, int] = POISON_BITS,
        run: Callable[[], None] | None = None,
    ) -> None:
        """Check the contract, poison ``out``, prepare, run and wait; look for writes outside the operands.

        While the route prepares, q and the live pages hold NaN (see :class:`Withheld`).

        Args:
            run: replaces the session's own ``run`` (a graph's replay).

        Raises:
            OperandsError: the operands are not what a route may count on: a fault of the check's own.
            FindingError: the route raised (``launch_error``), wrote outside, or wrote its inputs while it
                prepared (``out_of_bounds_write``).
        """
        stage = self.stage
        try:
            check_step(
                self.capacity,
                operands.step,
                level=Level.FULL,
                out=operands.out,
                pad_value=stage.trial.pad_value,
            )
        except ContractError as error:
            raise OperandsError(f"{stage.check} made operands that no route must take: {error}") from error
        poison(operands.out, patterns)
        text = stage.describe(label, operands.recipe.kv_lens)
        withheld = Withheld(operands)
        with calling(stage.trial, text):
            try:
                self.session.prepare(operands.step)
            finally:
                withheld.restore()
            if run is None:
                self.session.run(operands.out)
            else:
                run()
        stage.tally.launches += 1
        if places := self.arena.overwritten():
            raise FindingError(FailureKind.OUT_OF_BOUNDS_WRITE, f"{'; '.join(places[:3])} ({text})")
        if names := withheld.overwritten():
            what = f"the input {', '.join(names)} was overwritten by prepare"
            raise FindingError(FailureKind.OUT_OF_BOUNDS_WRITE, f"{what} ({text})")

    def judge(
        self,
        operands: Operands,
        label: str,
        ref: torch.Tensor,
        *,
        live: Sequence[int] | None = None,
        bound: float | None = None,
    ) -> oracle.Worst | None:
        """Look at ``out``: written, finite, right.

        Args:
            live: requests whose numbers count (the others must be written and finite); None: all.
            bound: None: the column's.

        Returns:
            The largest error, None if no row is live.

        Raises:
            FindingError: see the module's docstring.
        """
        stage, out, q_len = self.stage, operands.out, operands.column.q_len
        text = stage.describe(label, operands.recipe.kv_lens)
        finite = torch.isfinite(out)
        if not bool(finite.all()):
            stale = poisoned(out)
            bad, kind, what = (
                (stale, FailureKind.UNWRITTEN_OUTPUT, "left unwritten")
                if bool(stale.any())
                else (~finite, FailureKind.NAN_LEAK, "not finite")
            )
            row, head, _ = (int(i) for i in bad.nonzero()[0])
            where = stage.place(operands, row, head)
            raise FindingError(
                kind, f"{int(bad.sum())} of {out.numel()} elements {what}, first at {where} ({text})"
            )
        if live is not None and not live:
            return None
        rows = torch.arange(out.shape[0], device=out.device)
        if live is not None:
            rows = torch.cat([rows[r * q_len : (r + 1) * q_len] for r in live])
            out, ref = out[rows], ref[rows]
        found = oracle.worst(out, ref)
        found = replace(found, row=int(rows[found.row]))
        stage.tally.add(found.error)
        limit = stage.bound if bound is None else bound
        if found.error > limit:
            where = stage.place(operands, found.row, found.head)
            raise FindingError(
                FailureKind.WRONG_OUTPUT, f"error {found.error:.3g} > bound {limit:.3g} at {where} ({text})"
            )
        return found

    def launch(
        self,
        operands: Operands,
        label: str,
        *,
        live: Sequence[int] | None = None,
        bound: float | None = None,
    ) -> None:
        """Reference first (a kernel may damage its inputs), then :meth:`fire` and :meth:`judge`."""
        ref = oracle.reference(operands)
        self.fire(operands, label)
        self.judge(operands, label, ref, live=live, bound=bound)


@dataclass
class Stage:
    """One check of one trial in one placement."""

    check: str
    trial: Trial
    placement: Placement
    tally: Tally
    limits: list[str] = field(default_factory=list)
    requires: list[str] = field(default_factory=list)

    @property
    def arithmetic(self) -> Arithmetic:
        """The route's own, or fp32 where it declares none."""
        return arithmetic_of(self.trial.route, self.trial.column, self.trial.facts)

    @property
    def bound(self) -> float:
        """Largest error of a correct kernel in this column."""
        return oracle.bound(self.trial.column, self.arithmetic)

    def as_stored(self, recipe: Recipe) -> Recipe:
        """``recipe`` with the block scales in the order in which engines keep them on this machine."""
        interleaved = interleaves_v_scales(self.trial.column, self.trial.facts)
        return replace(recipe, interleaved_v_scales=interleaved) if interleaved else recipe

    def seed(self, index: int) -> int:
        """Operand seed number ``index``: of the trial's seed, the check and the placement."""
        return crc32(f"{self.trial.seed}/{self.check}/{self.placement.value}/{index}".encode())

    def describe(self, label: str, kv_lens: Sequence[int]) -> str:
        """The text of a launch: what the worker stores before it and a finding shows."""
        shown = ",".join(str(kv_len) for kv_len in kv_lens[:8])
        more = f",... {len(kv_lens)} rows" if len(kv_lens) > 8 else ""
        return f"{self.check}/{self.placement.value}: {label}, kv_lens {shown}{more}"

    def place(self, operands: Operands, row: int, head: int) -> str:
        """A row of ``out`` in words."""
        request, query = divmod(row, operands.column.q_len)
        kv_len = operands.recipe.kv_lens[request]
        return f"request {request} query {query} head {head}, kv_len {kv_len}"

    @contextmanager
    def opened(self, recipe: Recipe, sizes: Sizes | None = None) -> Iterator[Opened]:
        """A session for steps of at most ``recipe``'s size and exactly its pool, in an arena of its own.

        Args:
            sizes: gives the session's buffers other sizes, and hears of each.
        """
        trial, column = self.trial, self.trial.column
        rows = max(column.batch_size, len(recipe.kv_lens), column.interval[1] if column.interval else 0)
        capacity = capacity_of(column, recipe, trial.device, rows)
        with trial.make_arena(self.placement) as arena:

            def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
                if sizes is None:
                    return arena.tensor(name, shape, dtype)
                tensor = arena.tensor(name, sizes.resize(name, shape, dtype), dtype)
                sizes.made(name, tensor)
                return tensor

            what = f"{self.check}/{self.placement.value}: open for {rows} rows, {capacity.num_pages} pages"
            with calling(trial, what, opening=True):
                session = trial.route.open(capacity, allocate)
            try:
                if sizes is not None:
                    sizes.opened()
                yield Opened(self, arena, session, capacity)
            except BaseException:
                with suppress(Exception):  # the first error is the one to tell
                    session.close()
                raise
            with calling(trial, f"{self.check}/{self.placement.value}: close"):
                session.close()

    def one_pool(self, recipes: Sequence[Recipe]) -> list[Recipe]:
        """``recipes`` with the largest one's pool, so that one session serves them all."""
        total = max(pool_pages(self.trial.column, recipe) for recipe in recipes)
        return [replace(recipe, pool_pages=total) for recipe in recipes]

    def once(self, recipe: Recipe, label: str) -> None:
        """One launch in a session of its own, judged against the reference."""
        with self.opened(recipe) as opened:
            opened.launch(opened.build(recipe), label)

    def sequence(self, recipes: Sequence[Recipe], label: str) -> None:
        """Launches in one session, judged against the reference."""
        recipes = self.one_pool(recipes)
        with self.opened(max(recipes, key=lambda recipe: len(recipe.kv_lens))) as opened:
            for index, recipe in enumerate(recipes):
                opened.launch(opened.build(recipe), f"{label} {index + 1}/{len(recipes)}")


def conduct(check: Check, trial: Trial, body: Callable[[Stage], None]) -> CheckResult:
    """Run ``body`` in both placements and make the proof row.

    In inference mode: engines run in it, and routes are timed in it.

    Raises:
        BaseException: only what the worker must see itself: device errors, interrupts, faults of ours.
    """
    tally, done, limits = Tally(), [], []
    requires: set[str] = set()
    outcome = CheckResult(check.name, check.version, CheckStatus.PASSED, trial.seed)
    for placement in Placement:
        stage = Stage(check.name, trial, placement, tally)
        done.append(placement.value)
        try:
            with torch.inference_mode():
                body(stage)
        except FindingError as finding:
            outcome = replace(outcome, status=CheckStatus.FAILED, kind=finding.kind, detail=finding.detail)
        except ContractError as error:
            outcome = replace(outcome, status=CheckStatus.REFUSED, detail=str(error))
        except (ImportError, UnfitError) as error:
            outcome = _unproven(outcome, UnprovenReason.INFRASTRUCTURE, error)
        except NotImplementedError as error:  # the oracle's; a route's own became a finding
            outcome = _unproven(outcome, UnprovenReason.INFRASTRUCTURE, error)
        except Exception as error:
            if not (isinstance(error, ArenaError) or is_out_of_memory(error)):
                raise
            outcome = _unproven(outcome, UnprovenReason.OUT_OF_MEMORY, error)
        limits += [limit for limit in stage.limits if limit not in limits]
        requires.update(stage.requires)
        if outcome.status is not CheckStatus.PASSED:
            break
    return replace(
        outcome,
        launches=tally.launches,
        worst_error=tally.worst_error,
        requires=tuple(sorted(requires)),
        limits=tuple(limits),
        placements=tuple(done),
        slack=trial.slack,
    )


def _unproven(outcome: CheckResult, reason: UnprovenReason, error: BaseException) -> CheckResult:
    return replace(
        outcome, status=CheckStatus.UNPROVEN, reason=reason, detail=" ".join(str(error).split())[:300]
    )
