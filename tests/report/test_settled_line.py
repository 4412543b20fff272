"""The line that says how far a study is."""

from __future__ import annotations

import pytest

from autotune.report.summary import _waiting


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({}, ""),
        ({"graph": 1}, "; 1 of the rest only waits for a second process"),
        ({"graph": 8}, "; 8 of the rest only wait for a second process"),
        ({"step": 248}, "; 248 of the rest only wait for a second process, only under step"),
        (
            {"graph": 8, "step": 240},
            "; 248 of the rest only wait for a second process, 240 of them only under step",
        ),
    ],
)
def test_cells_that_wait(cells: dict[str, int], said: str) -> None:
    assert _waiting(cells, "graph") == said
