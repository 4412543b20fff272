"""Runs every route through the FlashInfer that this interpreter imports, compiled code replaced; prints JSON.

Started by ``test_flashinfer_library.py`` in a process of its own, since it replaces library functions.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autotune.domain.cell import Column
from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.routes.base import Capacity
from autotune.routes.flashinfer.ask import only_kernels
from autotune.routes.flashinfer.call import Call, bind, resolve
from autotune.routes.flashinfer.catalogue import routes
from autotune.routes.flashinfer.example import example_step
from autotune.routes.flashinfer.nogpu import no_gpu

BASE = Column(Shape(8, 1, 128, 64, kv_layout="fused-nhd"), DTypes("bf16", "bf16", "bf16"), 4, 2, 512)
COLUMNS = [
    replace(BASE, dtypes=DTypes("bf16", kv, "bf16"), q_len=q_len)
    for kv in ("bf16", "e4m3")
    for q_len in (1, 4, 5)
] + [
    replace(BASE, shape=replace(BASE.shape, num_qo_heads=32, num_kv_heads=2, head_dim=256, head_dim_vo=256)),
    replace(BASE, shape=replace(BASE.shape, kv_layout="interleaved-hnd", num_qo_heads=16, num_kv_heads=2)),
    replace(BASE, shape=replace(BASE.shape, kv_layout="packed-nhd", page_size=16)),
    replace(BASE, shape=replace(BASE.shape, kv_layout="packed-hnd", num_qo_heads=16, num_kv_heads=2)),
    replace(BASE, shape=replace(BASE.shape, window_left=100)),
    replace(BASE, shape=replace(BASE.shape, kv_layout="fused-hnd"), dtypes=DTypes("bf16", "nvfp4", "bf16")),
    replace(BASE, shape=replace(BASE.shape, sinks=True)),
]


def describe(value: Any) -> Any:
    """A launcher's argument as JSON."""
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "stride": list(value.stride()), "dtype": str(value.dtype)}
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(type(value).__name__)


class Launcher:
    """A compiled module that writes down what it is called with."""

    def __init__(self, name: str, into: list[dict[str, Any]]) -> None:
        self._name, self._into = name, into

    def __getattr__(self, function: str) -> Any:
        if function.startswith("__"):
            raise AttributeError(function)

        def call(*args: Any, **kwargs: Any) -> list[int]:
            self._into.append(
                {"module": self._name, "function": function, "args": [describe(arg) for arg in args]}
            )
            return []

        return call


def launcher(into: list[dict[str, Any]], spec: Any) -> Launcher:
    """Stands for the module that ``spec`` builds."""
    return Launcher(spec.name, into)


def main() -> None:
    """One record a route, column and device."""
    torch.set_num_threads(1)
    import flashinfer

    records: list[dict[str, Any]] = []
    for capability in ((9, 0), (10, 0)):
        facts = Facts(
            "cuda", {"compute_capability": f"{capability[0]}.{capability[1]}"}, {"flashinfer": "here"}
        )
        for column in COLUMNS:
            for route in routes():
                if route.supports(column, facts) is not None:
                    continue
                launches: list[dict[str, Any]] = []
                with (
                    only_kernels((128, 256), soft_cap=False),
                    no_gpu(capability, 132, partial(launcher, launches)),
                ):
                    step, out = example_step(column, (70, 130))
                    session = route.open(
                        Capacity(column, 2, step.k.shape[0], "cpu"),
                        lambda name, shape, dtype: torch.empty(shape, dtype=dtype),
                    )
                    session.prepare(step)
                    session.run(out)
                    call: Call = session._call  # type: ignore[attr-defined]
                    launched = replace(call, kwargs={**call.kwargs, "out": out})
                    bind(launched, inspect.signature(resolve(call.target)))
                    session.close()
                records.append(
                    {
                        "route": route.name,
                        "capability": list(capability),
                        "column": column.to_dict(),
                        "launches": launches,
                    }
                )
    data = {"version": str(flashinfer.__version__), "records": records}
    Path(sys.argv[1]).write_text(json.dumps(data))


if __name__ == "__main__":
    main()
