"""What a trial is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.routes.planted import Planted


def test_a_trial_pads_as_its_column_says(make_trial: Any) -> None:
    trial = make_trial(Planted("planted-clean"), pad_value=0)
    assert trial.pad_value == trial.column.pad_value == 0
    with pytest.raises(ValueError, match="pad_value 1 is not the column's 0"):
        replace(trial, pad_value=1)
