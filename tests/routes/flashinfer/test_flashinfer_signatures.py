"""Every call of every route binds to the signatures of the FlashInfer versions it is written for."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.routes.flashinfer.call import Call, bind
from autotune.routes.flashinfer.catalogue import routes

SNAPSHOTS = Path(__file__).parents[2] / "data" / "flashinfer-signatures.json"
VERSIONS: dict[str, dict[str, list[list[Any]]]] = json.loads(SNAPSHOTS.read_text())


def signature(parameters: list[list[Any]]) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                getattr(inspect.Parameter, kind),
                default=None if optional else inspect.Parameter.empty,
            )
            for name, kind, optional in parameters
        ]
    )


def test_both_versions_are_snapshotted() -> None:
    assert {"0.6.18.post1", "0.7.2"} <= set(VERSIONS)


@pytest.mark.parametrize("version", sorted(VERSIONS))
@pytest.mark.parametrize("kv", ["bf16", "e4m3"])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("capability", ["9.0", "10.0"])
def test_every_call_binds(
    version: str,
    kv: str,
    q_len: int,
    capability: str,
    make_column: Callable[..., Column],
    make_facts: Callable[..., Facts],
    recorder: Any,
) -> None:
    column = make_column(kv=kv, q_len=q_len)
    launched = 0
    for route in routes():
        if route.supports(column, make_facts(capability)) is None:
            recorder.launch(route, column)
            launched += 1
    assert launched >= 5 and len(recorder.calls) >= launched
    for call in recorder.calls:
        bind(call, signature(VERSIONS[version][call.target]))


def test_a_call_of_another_version_does_not_bind() -> None:
    parameters = VERSIONS["0.6.18.post1"]["flashinfer.prefill:trtllm_fmha_v2_prefill"]
    call = Call("flashinfer.prefill:trtllm_fmha_v2_prefill", {"qkv": None, "no_such_argument": 1})
    with pytest.raises(TypeError):
        bind(call, signature(parameters))
