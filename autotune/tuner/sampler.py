"""Optuna's side of the adaptive search: a sampler for the one integer parameter, the cell's number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from optuna.samplers import BaseSampler

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial


class CellSampler(BaseSampler):
    """Answers an ask with the number of the cell that ``choose`` names.

    A trial that was enqueued with its number is never brought here. What is known of the cells is read from
    the study's rows when a call begins, not from Optuna's trials: the sampler itself keeps nothing.
    """

    def __init__(self, choose: Callable[[], int]) -> None:
        self._choose = choose

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Nothing: there is one parameter, and nothing that it could be relative to."""
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Nothing."""
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The cell to take next."""
        return self._choose()
