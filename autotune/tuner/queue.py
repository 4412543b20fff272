"""The Optuna study: one trial a cell, asked and told in the parent.

Our own cell table is the queue: a cell is enqueued just before it is asked (enqueueing all of them first
makes each ask slower than the last). The parameter is one integer, the cell's number; the axes are user
attributes, so that a dashboard can plot them and a larger space stays compatible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.store.optuna_storage import rdb_storage
from autotune.store.records import TrialState as OurState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import optuna

    from autotune.domain.decision import Decision
    from autotune.store.database import Database
    from autotune.store.records import Study, StudyCell
    from autotune.store.repository import Repository

PARAMETER = "cell"
# User attribute of a trial that only looked.
LOOK = "look"
# One fixed range: a study's distribution may not change while it grows.
HIGHEST = (1 << 31) - 1


def value_of(decision: Decision) -> float:
    """What Optuna maximises: time(fallback) / time(answer); 1.0 where the answer is the fallback."""
    return decision.speedup if decision.route is not None and decision.speedup is not None else 1.0


class TrialQueue:
    """Ask and tell for one study. Every call is outside our own write transactions."""

    def __init__(self, database: Database, repository: Repository, study: Study) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._database = database
        self._repository = repository
        self._ours = study
        self._space: dict[str, optuna.distributions.BaseDistribution] = {
            PARAMETER: optuna.distributions.IntDistribution(0, HIGHEST)
        }
        storage = rdb_storage(database)
        with database.translated():
            self._study = optuna.create_study(
                storage=storage,
                study_name=study.optuna_name,
                direction="maximize",
                load_if_exists=True,
                # every parameter is enqueued, unless `sample_with` sets another: this one is never asked
                sampler=optuna.samplers.RandomSampler(seed=0),
            )
        # by cell number: several takers may each have a trial that runs
        self._running: dict[int, optuna.Trial] = {}
        self._looking: set[int] = set()

    def recover(self, cells: Iterable[StudyCell], decisions: Mapping[str, Decision]) -> int:
        """End the trials that a killed process left behind.

        A trial that was enqueued and never asked would be handed to the next ask: it is asked and failed
        here. A running one whose cell has its decision was only not told: it is told now. Any other is told
        as failed, and its cell, which is still pending, gets a new trial. Afterwards the cells with a
        decision are exactly those with a complete trial, one each.

        Args:
            cells: the study's.
            decisions: by cell id.

        Returns:
            How many were ended.
        """
        from optuna.trial import TrialState

        by_number = {item.number: item for item in cells}
        ended = 0
        with self._database.translated():
            while self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                self._study.tell(self._study.ask(self._space), state=TrialState.FAIL)
                ended += 1
            complete = self._complete()
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                number = trial.params.get(PARAMETER, -1)
                item = by_number.get(number)
                decision = decisions.get(item.cell.id) if item is not None else None
                if decision is not None and number not in complete:
                    self._study.tell(trial.number, value_of(decision))
                    complete.add(number)
                else:
                    self._study.tell(trial.number, state=TrialState.FAIL)
                ended += 1
        ours = self._repository.trials(self._ours)
        for item in by_number.values():
            # without a decision it stays "running": the next attempt counts the kill
            if item.cell.id in decisions and ours[item.cell.id].state is not OurState.COMPLETE:
                self._repository.finish_trial(self._ours, item.cell, OurState.COMPLETE)
        return ended

    def _complete(self) -> set[int]:
        """Numbers of the cells that have a complete trial."""
        from optuna.trial import TrialState

        done = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return {trial.params[PARAMETER] for trial in done}

    def note(self, name: str, value: Any) -> None:
        """Keep a JSON value beside the study, where a dashboard shows it."""
        with self._database.translated():
            self._study.set_user_attr(name, value)

    def noted(self, name: str) -> Any:
        """What :meth:`note` kept, None if nothing."""
        with self._database.translated():
            return self._study.user_attrs.get(name)

    def sample_with(self, choose: Callable[[], int]) -> None:
        """From now on :meth:`ask` gets the cell whose number ``choose`` names."""
        from autotune.tuner.sampler import CellSampler

        self._study.sampler = CellSampler(choose)

    def ask(self, cells: Mapping[int, StudyCell], *, look: bool = False) -> StudyCell:
        """Start a trial of the cell that the sampler chooses.

        Args:
            cells: by number; the sampler must choose one of them.
            look: search rounds only: it ends by :meth:`looked`, and is no attempt at the cell.
        """
        with self._database.translated():
            trial = self._study.ask(self._space)
            item = cells[trial.params[PARAMETER]]
            for name, value in _axes(item).items():
                trial.set_user_attr(name, value)
        self._running[item.number] = trial
        if look:
            self._looking.add(item.number)
        else:
            self._repository.begin_trial(self._ours, item.cell, trial.number, trial._trial_id)
        return item

    def looked(self, item: StudyCell, found: Mapping[str, Any]) -> None:
        """Keep what a look found, then end its trial as pruned; the cell stays pending."""
        from optuna.trial import TrialState

        trial = self._running.pop(item.number)
        self._looking.discard(item.number)
        with self._database.translated():
            trial.set_user_attr(LOOK, dict(found))
            self._study.tell(trial, state=TrialState.PRUNED)

    def looks(self) -> dict[int, Mapping[str, Any]]:
        """What looks found, by cell number; the latest of each."""
        with self._database.translated():
            trials = self._study.get_trials(deepcopy=False)
        return {
            trial.params[PARAMETER]: trial.user_attrs[LOOK] for trial in trials if LOOK in trial.user_attrs
        }

    def begin(self, item: StudyCell) -> None:
        """Start the trial of a cell."""
        with self._database.translated():
            self._study.enqueue_trial({PARAMETER: item.number}, user_attrs=_axes(item))
            trial = self._study.ask(self._space)
        assert trial.params[PARAMETER] == item.number
        self._running[item.number] = trial
        self._repository.begin_trial(self._ours, item.cell, trial.number, trial._trial_id)

    def on_device(self, item: StudyCell, name: str) -> None:
        """Keep beside a cell's running trial which of several devices it is settled on."""
        if (trial := self._running.get(item.number)) is not None:
            with self._database.translated():
                trial.set_user_attr("device", name)

    def finish(self, item: StudyCell, decision: Decision) -> None:
        """Store the decision, then tell Optuna: a kill in between is mended by :meth:`recover`."""
        trial = self._running.pop(item.number)
        self._repository.save_decision(self._ours, item.cell, decision)
        self._repository.finish_trial(self._ours, item.cell, OurState.COMPLETE)
        with self._database.translated():
            trial.set_user_attr("answer", decision.route or decision.reason.value)
            self._study.tell(trial, value_of(decision))

    def amend(self, item: StudyCell, decision: Decision) -> None:
        """Replace the decision of a cell whose trial is complete; Optuna keeps the value that it was told."""
        self._repository.save_decision(self._ours, item.cell, decision)

    def abandon(self, item: StudyCell, state: OurState) -> None:
        """End the trial without a decision; the cell stays pending."""
        from optuna.trial import TrialState

        trial = self._running.pop(item.number, None)
        if trial is None:
            return
        if item.number in self._looking:
            self._looking.discard(item.number)
        else:
            self._repository.finish_trial(self._ours, item.cell, state)
        with self._database.translated():
            self._study.tell(trial, state=TrialState.FAIL)


def _axes(item: StudyCell) -> dict[str, object]:
    column = item.cell.column
    shape, dtypes = column.shape, column.dtypes
    return {
        "models": ", ".join(item.models),
        "heads": f"{shape.num_qo_heads}/{shape.num_kv_heads}/{shape.head_dim}",
        "dtypes": f"{dtypes.q}/{dtypes.kv}/{dtypes.out}",
        "q_len": column.q_len,
        "batch_size": column.batch_size,
        "kv_high": item.cell.kv_high,
    }
