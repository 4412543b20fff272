"""Proves the emulated trtllm-gen routes through the FlashInfer that this interpreter imports; prints JSON.

Started by ``test_emulation.py`` in a process of its own, whose worker's children import that FlashInfer.

    drive_emulation.py OUT proofs ROUTE...
    drive_emulation.py OUT mistakes
    drive_emulation.py OUT arguments
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autotune.checks import registry
from autotune.domain.cell import Column
from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.hardware.flashinfer import flashinfer_facts
from autotune.routes.base import Capacity
from autotune.routes.flashinfer.emulation.planted import MISTAKES
from autotune.routes.flashinfer.emulation.route import BASES, CAPABILITY, SM_COUNT, b200, emulated
from autotune.routes.flashinfer.example import example_step
from autotune.routes.flashinfer.nogpu import no_gpu
from autotune.worker.base import Channel, Completed
from autotune.worker.jobs import ProveJob, run_check
from autotune.worker.worker import Worker
from tests.routes.flashinfer.launcher_calls import function_of, positional

# The device is this machine's CPU, the facts that decide how an engine stores its pool are a B200's.
FACTS = b200(Facts("cpu", {"name": "this machine"}, {"torch": torch.__version__}))
KV_LENS = (64, 300, 640)


def column(
    heads: tuple[int, int, int] = (8, 1, 128),
    kv: str = "bf16",
    q_len: int = 4,
    layout: str = "fused-nhd",
    **shape: Any,
) -> Column:
    """Small pages, so that every row has many; a context that a decode launch splits."""
    return Column(Shape(*heads, 16, kv_layout=layout, **shape), DTypes("bf16", kv, "bf16"), q_len, 3, 640)


# heads as Llama-3.1-70B at TP 8 and Qwen3.5-397B with its attention whole
COLUMNS = {
    "bf16": column(),
    "bf16 q1": column((32, 2, 256), q_len=1, layout="interleaved-nhd"),
    "bf16 window, sinks": column((16, 2, 64), q_len=4, layout="separate-hnd", window_left=40, sinks=True),
    "bf16 packed": column((16, 2, 128), layout="packed-hnd"),
    "e4m3": column((32, 2, 256), "e4m3"),
    "e4m3 packed": column(kv="e4m3", layout="packed-hnd"),
    "e4m3 q1": column(kv="e4m3", q_len=1),
    "nvfp4": column((16, 2, 128), "nvfp4", layout="fused-hnd"),
    "nvfp4 q1": column((32, 2, 256), "nvfp4", q_len=1, layout="separate-hnd"),
}
# Every dtype for every route; what else there is for one or two of them.
PROVEN = {
    "trtllm-gen-decode": ("bf16", "e4m3", "nvfp4", "bf16 q1", "bf16 window, sinks", "bf16 packed"),
    "trtllm-gen-decode-ragged": ("bf16", "e4m3", "nvfp4", "e4m3 q1", "e4m3 packed"),
    "trtllm-gen-context": ("bf16", "e4m3", "nvfp4", "nvfp4 q1", "bf16 window, sinks", "bf16 packed"),
}
# mistake -> where it shows, the column and the check
SHOWN = {
    "narrow-table": ("bf16", "ragged_lengths"),
    "key-scale-left-out": ("e4m3", "scales"),
    "value-scale-left-out": ("e4m3", "scales"),
    "sinks-left-out": ("bf16 window, sinks", "reference"),
    "swapped-block-scales": ("nvfp4", "reference"),
    "linear-value-scales": ("nvfp4", "reference"),
    "spread-value-scales": ("nvfp4", "reference"),
}


def rows(worker: Worker, route: str, asked: Column, checks: tuple[str, ...]) -> list[dict[str, Any]]:
    """Each check's row, as a worker's child made it or died of it."""
    found = []
    for check in checks:
        job = ProveJob(
            route,
            check,
            asked.to_dict(),
            FACTS.to_dict(),
            KV_LENS,
            seed=1,
            device="cpu",
            arena_kind="host_mmap",
        )
        found.append({"route": route, **run_check(worker, job).to_dict()})
    return found


def proofs(worker: Worker, names: list[str]) -> list[dict[str, Any]]:
    """Every check of the routes ``names`` in their columns."""
    found = []
    for name in names:
        route = f"emulated-{name}"
        for label in PROVEN[name]:
            asked = COLUMNS[label]
            refused = emulated(route).supports(asked, FACTS)
            assert refused is None, refused
            made = rows(worker, route, asked, registry.expected(asked, "cpu"))
            found += [{"column": label, **row} for row in made]
    return found


def mistakes(worker: Worker) -> list[dict[str, Any]]:
    """Every mistake in the check that it must fail."""
    found = []
    for name in MISTAKES:
        mistake = name.removeprefix("emulated-").partition("-in-trtllm-gen-")[0]
        label, check = SHOWN.get(mistake, ("bf16", "reference"))
        found += [{"mistake": mistake, "column": label, **rows(worker, name, COLUMNS[label], (check,))[0]}]
    return found


@dataclass(frozen=True)
class Compare:
    """A job: do ``launcher_calls.positional`` and the library pass the same arguments?"""

    def __call__(self, channel: Channel) -> list[str]:
        """Differences, each in a line; and how many calls were compared."""
        found, compared = [], 0
        for base in BASES.values():
            for label, asked in COLUMNS.items():
                seen: list[tuple[str, tuple[Any, ...]]] = []
                with no_gpu(CAPABILITY, SM_COUNT, partial(_recorder, seen)):
                    step, out = example_step(asked, (70, 130, 33))
                    session = base.open(
                        Capacity(asked, 3, step.k.shape[0], "cpu"),
                        lambda name, shape, dtype: torch.empty(shape, dtype=dtype),
                    )
                    session.prepare(step)
                    session.run(out)
                    call = session._call  # type: ignore[attr-defined]
                ((function, args),) = seen
                # with an NVFP4 cache the kernel writes into a buffer of the session's
                mine = positional(call, args[0], older=len(args) < (36 if "decode" in function else 35))
                compared += 1
                if function != function_of(call) or len(args) != len(mine):
                    found.append(
                        f"{base.name}, {label}: {function} with {len(args)} arguments, not {len(mine)}"
                    )
                    continue
                for place, (theirs, ours) in enumerate(zip(args, mine, strict=True)):
                    if not _same(theirs, ours):
                        found.append(
                            f"{base.name}, {label}: argument {place} is {theirs!r}, not {ours!r}"[:300]
                        )
        return [*found, f"compared {compared}"]


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        return (theirs.data_ptr(), theirs.shape, theirs.stride(), theirs.dtype) == (
            ours.data_ptr(),
            ours.shape,
            ours.stride(),
            ours.dtype,
        )
    return type(theirs) is type(ours) and bool(theirs == ours)


class _Recorder:
    def __init__(self, into: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._into = into

    def __getattr__(self, function: str) -> Any:
        return lambda *args: self._into.append((function, args))


def _recorder(into: list[tuple[str, tuple[Any, ...]]], spec: Any) -> _Recorder:
    return _Recorder(into)


def main() -> None:
    """Write what was asked for."""
    torch.set_num_threads(1)
    data: dict[str, Any] = {"version": flashinfer_facts()["flashinfer"]}
    with Worker("cpu") as worker:
        if sys.argv[2] == "proofs":
            data["rows"] = proofs(worker, sys.argv[3:])
        elif sys.argv[2] == "mistakes":
            data["rows"] = mistakes(worker)
        else:
            from tests.routes.flashinfer.drive_emulation import Compare  # a child has another __main__

            outcome = worker.run(Compare(), timeout_s=100)
            data["rows"] = outcome.value if isinstance(outcome, Completed) else [repr(outcome)]
    Path(sys.argv[1]).write_text(json.dumps(data))


if __name__ == "__main__":
    main()
