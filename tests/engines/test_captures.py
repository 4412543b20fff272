"""What the SGLang hook notes of a captured call: the kernel that the layer's call goes to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.engines import sglang
from autotune.engines.choice import Choice
from autotune.engines.runtime import Runtime
from tests.engines import tables


@pytest.mark.parametrize(("kernel", "ran"), [(None, "xqa-decode"), ("fmha-v2", "fmha-v2")])
def test_the_kernel_that_runs_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str | None, ran: str
) -> None:
    context = None if kernel is None else Choice(kernel, "not_faster", "", decided=True)
    runtime = Runtime(tables.router(tmp_path / "h200.yaml"), engine="sglang")
    plugin = sglang.Plugin(lambda: runtime)
    plugin.runtime = runtime
    monkeypatch.setattr(sglang, "capturing", lambda: True)
    monkeypatch.setattr(sglang, "_stock_name", lambda backend: "xqa-decode")
    monkeypatch.setattr(plugin, "_context", lambda *given: context)
    chooser = runtime.chooser(
        tables.KIND,
        tables.BF16,
        max_context=512,
        stock="xqa-decode",
        fallback="fmha-v2",
        deployable=frozenset({"fmha-v2"}),
    )
    mode = object()
    step = sglang._Step(mode, 4, 4)
    column: Any = None
    step.choices[0] = (chooser.choose(4, 4), chooser, column)
    call = {
        "layer": SimpleNamespace(layer_id=0),
        "forward_batch": SimpleNamespace(forward_mode=mode, batch_size=4),
    }
    assert plugin._take_context(step, (object(),), call) is context
    ((key, note),) = runtime.captures._notes.items()
    assert key == (tables.KIND, tables.BF16, 512, 4, 4) and note.ran == ran
    # the router names fmha-v2 for rows that disagree, and is told only where that ran
    assert bool(runtime.router._pinned) is (ran == "fmha-v2")
