"""The engine's pad value is part of what is proven."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.domain.cell import Column
from autotune.space import SpaceError, expand, load_engine, load_profile


def test_engines_that_pad_differently_share_no_proof() -> None:
    engine = load_engine("generic")
    one, zero = (expand(load_profile("cpu"), replace(engine, pad_value=pad)).columns for pad in (1, 0))
    assert not {column.id for column in one} & {column.id for column in zero}
    assert [Column.from_dict(column.to_dict()) for column in zero] == list(zero)
    assert {column.pad_value for column in zero} == {0}


def test_a_pad_value_that_no_row_can_have() -> None:
    engine = replace(load_engine("generic"), pad_value=10**6)
    with pytest.raises(SpaceError, match="engine generic: pad_value 1000000 lies past max_context"):
        expand(load_profile("cpu"), engine)
