"""Who takes what: each route's limits, as FlashInfer's own checks and tests state them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.routes.flashinfer.catalogue import routes

BY_NAME = {route.name: route for route in routes()}
HOPPER, B200, RUBIN, WORKSTATION, ADA = "9.0", "10.0", "10.7", "12.0", "8.9"

TAKEN = [
    ("xqa-decode", HOPPER, {}),
    ("xqa-decode", HOPPER, {"kv": "e4m3"}),
    ("xqa-decode", B200, {"q_len": 8}),
    ("xqa-decode", WORKSTATION, {"page": 128}),
    ("xqa-decode", HOPPER, {"heads": (32, 2, 256), "q_len": 1}),
    ("xqa-decode", HOPPER, {"heads": (32, 1, 256), "q_len": 1}),
    ("xqa-decode", HOPPER, {"heads": (64, 1, 256), "q_len": 2}),  # the group limit is q_len 1's
    ("xqa-decode", HOPPER, {"sinks": True, "window_left": 127}),
    ("trtllm-gen-decode", B200, {}),
    ("trtllm-gen-decode", "10.3", {"kv": "e4m3"}),
    ("trtllm-gen-decode", B200, {"kv": "nvfp4", "layout": "fused-hnd"}),
    ("trtllm-gen-decode-ragged", B200, {"heads": (64, 8, 64), "sinks": True}),
    ("trtllm-gen-context", B200, {"kv": "e4m3", "page": 128}),
    ("fmha-v2", HOPPER, {}),
    ("fmha-v2", HOPPER, {"kv": "e4m3", "heads": (8, 1, 256)}),
    ("fmha-v2", WORKSTATION, {"layout": "interleaved-hnd"}),
    ("fa2", ADA, {}),
    ("fa2", HOPPER, {"kv": "e4m3", "soft_cap": 30.0, "window_left": 64}),
    ("fa2", HOPPER, {"kv": "nvfp4"}),
    ("fa2", HOPPER, {"heads": (8, 1, 512)}),
    ("fa3", HOPPER, {"kv": "e4m3"}),
    ("fa3", HOPPER, {"heads": (8, 1, 192), "head_dim_vo": 128}),
    ("fa2-decode", B200, {"kv": "e4m3"}),
]

REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("xqa-decode", ADA, {}, "9.x, 10.x, 12.x"),
    ("xqa-decode", HOPPER, {"q": "e4m3", "kv": "e4m3"}, "bf16 or fp16 query, not e4m3"),
    ("xqa-decode", HOPPER, {"kv": "nvfp4"}, "12.x only"),
    ("xqa-decode", HOPPER, {"q": "fp16", "out": "fp16"}, "bf16 query only"),
    ("xqa-decode", HOPPER, {"out": "fp16"}, "writes the query's dtype"),
    ("xqa-decode", HOPPER, {"heads": (8, 1, 120)}, "multiple of 16"),
    ("xqa-decode", HOPPER, {"heads": (8, 1, 512)}, "q_len 1 only"),
    ("xqa-decode", HOPPER, {"heads": (32, 1, 512), "q_len": 1}, "at most 16 query heads"),
    ("xqa-decode", HOPPER, {"heads": (64, 1, 256), "q_len": 1}, "at most 32 query heads"),
    ("xqa-decode", HOPPER, {"page": 8}, "pages of 16, 32, 64, 128"),
    ("xqa-decode", HOPPER, {"soft_cap": 30.0}, "no logits soft cap"),
    ("trtllm-gen-decode", HOPPER, {}, "10.x"),
    ("trtllm-gen-decode", RUBIN, {}, "10.0 and 10.3"),
    ("trtllm-gen-decode", B200, {"page": 48}, "power of two"),
    ("trtllm-gen-decode", B200, {"page": 8}, "16 tokens or more"),
    ("trtllm-gen-decode", B200, {"kv": "nvfp4", "heads": (16, 2, 128)}, "HND pool"),
    ("trtllm-gen-decode", B200, {"kv": "nvfp4", "heads": (8, 1, 96)}, "a head_dim that 64 divides"),
    ("trtllm-gen-decode", B200, {"out": "e4m3"}, "not e4m3"),
    ("trtllm-gen-context", B200, {"heads": (8, 1, 96)}, "64, 128, 256, 512"),
    ("trtllm-gen-context", B200, {"soft_cap": 30.0}, "no logits soft cap"),
    ("fmha-v2", B200, {}, "9.x, 12.x"),
    ("fmha-v2", WORKSTATION, {"kv": "e4m3"}, "no fp8"),
    ("fmha-v2", HOPPER, {"layout": "separate-nhd"}, "one allocation"),
    ("fmha-v2", HOPPER, {"layout": "packed-nhd"}, "between K's rows"),
    ("trtllm-gen-decode", B200, {"kv": "nvfp4", "layout": "packed-hnd"}, "heads of their own"),
    ("fmha-v2", HOPPER, {"kv": "nvfp4"}, "bf16, fp16, e4m3, not nvfp4"),
    ("fmha-v2", HOPPER, {"heads": (8, 1, 512)}, "head_dim"),
    ("fa2", "7.5", {}, "8.x"),
    ("fa2", HOPPER, {"sinks": True}, "ignores sinks"),
    ("fa2", B200, {"kv": "nvfp4"}, "interleaved there"),
    ("fa2-decode", B200, {"kv": "nvfp4"}, "interleaved there"),
    ("fa2", HOPPER, {"q": "e4m3", "kv": "e4m3"}, "not e4m3"),
    ("fa2", HOPPER, {"kv": "e4m3", "heads": (8, 1, 512)}, "64, 128, 256, not 512"),
    ("fa3", B200, {}, "9.x"),
    ("fa3", HOPPER, {"kv": "e4m3", "heads": (8, 1, 64)}, "no fp8 kernel at head_dim 64"),
    ("fa3", HOPPER, {"kv": "nvfp4"}, "not nvfp4"),
    ("fa3", HOPPER, {"sinks": True}, "ignores sinks"),
    ("fa3", HOPPER, {"heads": (8, 1, 96)}, "64, 128, 256"),
    ("fa2-decode", HOPPER, {"sinks": True}, "ignores sinks"),
]


@pytest.mark.parametrize(("name", "capability", "kwargs"), TAKEN)
def test_taken(
    name: str,
    capability: str,
    kwargs: dict[str, Any],
    make_column: Callable[..., Column],
    make_facts: Callable[..., Facts],
) -> None:
    assert BY_NAME[name].supports(make_column(**kwargs), make_facts(capability)) is None


@pytest.mark.parametrize(("name", "capability", "kwargs", "reason"), REFUSED)
def test_refused_in_one_line(
    name: str,
    capability: str,
    kwargs: dict[str, Any],
    reason: str,
    make_column: Callable[..., Column],
    make_facts: Callable[..., Facts],
) -> None:
    said = BY_NAME[name].supports(make_column(**kwargs), make_facts(capability))
    assert said is not None and reason in said and "\n" not in said


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_neither_a_cpu_nor_a_missing_library_will_do(
    name: str, make_column: Callable[..., Column], make_facts: Callable[..., Facts]
) -> None:
    cpu = Facts("cpu", {"name": "x"}, {"torch": "2"})
    assert "CUDA" in str(BY_NAME[name].supports(make_column(), cpu))
    capability = B200 if name.startswith("trtllm") else HOPPER
    said = BY_NAME[name].supports(make_column(), make_facts(capability, None))
    assert said == "FlashInfer is not installed"


def test_names_are_unique_and_planned_routes_say_so() -> None:
    assert len(BY_NAME) == 8
    for route in routes():
        planned = route.name in ("fa2", "fa3", "fa2-decode")
        assert (route.capture.value == "replan") == planned
        assert ("host_kv_lens" in {need.value for need in route.needs}) == planned
