"""What the library says where a trtllm-gen kernel is missing: it accuses nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autotune.domain.cell import Column
from autotune.routes.contract import ContractError
from autotune.routes.flashinfer import session as sessions
from autotune.routes.flashinfer.emulation.route import BASES
from autotune.routes.flashinfer.example import example_step

MakeColumn = Callable[..., Column]


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize(
    ("said", "expected", "text"),
    [
        (
            "Error in function 'f' at x.cu:320:\n  Missing TRTLLM-GEN kernel (context): headDimQk=64",
            ContractError,
            "contract rule kernel: .*Missing TRTLLM-GEN kernel",
        ),
        (
            "Failed to load cubin for fmhaSm100",
            ImportError,
            "a precompiled kernel is not here: Failed to load",
        ),
        ("CUDA error: an illegal memory access was encountered", RuntimeError, "illegal memory access"),
    ],
)
@pytest.mark.parametrize("kv", ["bf16", "nvfp4"])
def test_a_missing_kernel_is_no_failure(
    make_column: MakeColumn,
    recorder: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    said: str,
    expected: type[Exception],
    text: str,
    kv: str,
) -> None:
    def raising(target: str) -> Callable[..., Any]:
        def function(**kwargs: Any) -> None:
            raise RuntimeError(said)

        return function

    monkeypatch.setattr(sessions, "resolve", raising)
    column = make_column(kv=kv, layout="fused-hnd")
    session = recorder.open(BASES[name], column)
    step, out = example_step(column, (70, 130))
    session.prepare(step)
    with pytest.raises(expected, match=text):
        session.run(out)
