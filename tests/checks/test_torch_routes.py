"""The routes that ship for the CPU, through every check in guarded memory."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.checks import registry
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import KvLayout, Shape
from autotune.domain.verdict import CheckStatus
from autotune.routes.base import Route
from autotune.routes.torch_sdpa import TorchSdpa
from autotune.routes.torch_splitkv import TorchSplitKv

COLUMNS = [
    Column(Shape(8, 1, 128, 16), PROFILES["bf16"], 4, 4, 2048),
    Column(Shape(8, 1, 128, 16), PROFILES["fp32"], 1, 3, 2048),
    Column(Shape(4, 2, 64, 16, window_left=30), PROFILES["fp32"], 4, 2, 512),
    Column(Shape(4, 2, 64, 16), PROFILES["bf16"], 3, 3, 512, interval=(2, 5)),
    *(Column(Shape(4, 2, 64, 8, kv_layout=layout.value), PROFILES["bf16"], 2, 2, 256) for layout in KvLayout),
]


@pytest.mark.parametrize("route", [TorchSdpa(), TorchSplitKv()], ids=lambda route: route.name)
@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: f"{column} {column.shape.kv_layout}")
def test_route_passes_every_check(route: Route, column: Column, make_trial: Any) -> None:
    for check in registry.CHECKS:
        trial = make_trial(route, column, (64, column.max_context))
        if check.applies(trial) is None:
            row = check.run(trial)
            assert row.status is CheckStatus.PASSED, row.detail
