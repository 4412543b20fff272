"""The story that this project began with, replayed: verify calls with the metadata of a prefill. Prints JSON.

    PYTHONPATH=FLASHINFER_SITE:. python tests/engines/drive_story.py unprotected|refused|lengths|routed

Two requests of 68 and 132 tokens, 4 of them new, pages of 16 tokens, max context 640. The library is the
installed FlashInfer as on a B200, its compiled launcher emulated in guarded memory: a page id that is read
past the table's end ends the process with a real SIGSEGV.

- ``unprotected``: a page table as a prefill has it (as wide as the cached tokens need), lengths with the new
tokens
- ``refused``: the same call through ``install``; what a refused call gets is the fallback
- ``lengths``: the table and the lengths of a prefill (without the new tokens), unprotected and through
``install``
- ``routed``: right metadata through ``install``, against attention in fp64
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from autotune.arena.factory import open_arena
from autotune.arena.operands import Operands, Recipe, build
from autotune.checks.oracle import reference, worst
from autotune.domain.cell import Column
from autotune.domain.decision import Decision, Reason
from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.engines import flashinfer
from autotune.router import Router
from autotune.routes.flashinfer import trtllm_gen
from autotune.routes.flashinfer.emulation.launcher import Launchers
from autotune.routes.flashinfer.emulation.route import CAPABILITY, SM_COUNT
from autotune.routes.flashinfer.metadata import WORKSPACE_BYTES
from autotune.routes.flashinfer.nogpu import no_gpu
from autotune.table.build import build_table
from autotune.table.dump import dump_table
from autotune.table.model import Policy
from tests.table.samples import CUDA_FACTS, GENERATED, decided

Q_LEN, CONTEXT, PAGE = 4, 640, 16
# 132 tokens are nine pages; without the new ones they are eight
LENS = (68, 132)
DECODE, FALLBACK = "trtllm-gen-decode", "trtllm-gen-context"
SHAPE, DTYPES = Shape(8, 1, 128, PAGE), DTypes("bf16", "bf16", "bf16")
COLUMN = Column(SHAPE, DTYPES, Q_LEN, len(LENS), CONTEXT)
B200 = Facts(
    "cuda",
    {**CUDA_FACTS.hardware, "name": "NVIDIA B200", "compute_capability": "10.0", "sm_count": SM_COUNT},
    CUDA_FACTS.software,
)


def table(folder: Path) -> Path:
    """Decode is proven for a batch of two."""
    faster = Decision(DECODE, Reason.PROVEN_FASTER, "", 1.3, 1.4, 1.0)
    made = build_table(
        [
            decided(
                len(LENS),
                (Q_LEN, CONTEXT),
                faster,
                shape=SHAPE,
                dtypes=DTYPES,
                max_context=CONTEXT,
                fallback=FALLBACK,
            )
        ],
        facts=B200,
        generated=GENERATED,
        policy=Policy("sglang", DECODE, "graph", 0.03, 0.01, 0.05),
        families={DECODE: "decode", FALLBACK: "context"},
    )
    path = folder / "b200.sglang.yaml"
    path.write_bytes(dump_table(made))
    return path


def engine_call(
    operands: Operands, allocate: Any, *, prefill_table: bool, prefill_lens: bool
) -> dict[str, Any]:
    """What the engine hands to FlashInfer's decode function."""
    step = operands.step
    cached = max(LENS) - Q_LEN
    page_table, seq_lens = step.page_table, step.seq_lens
    if prefill_table:
        page_table = allocate("prefill_table", (len(LENS), -(-cached // PAGE)), torch.int32)
        page_table.copy_(step.page_table[:, : page_table.shape[1]])
    if prefill_lens:
        seq_lens = allocate("prefill_lens", (len(LENS),), torch.int32)
        seq_lens.copy_(step.seq_lens - Q_LEN)
    counters = allocate("counters", (trtllm_gen.counter_bytes(len(LENS), 8),), torch.uint8)
    counters.zero_()
    call = trtllm_gen.decode_call(
        step,
        step.q,
        seq_lens,
        page_table,
        workspace=allocate("workspace", (WORKSPACE_BYTES,), torch.uint8),
        counters=counters,
        window_left=-1,
    )
    return {**call.kwargs, "out": operands.out}


def serve(operands: Operands, arguments: dict[str, Any]) -> float:
    """One call by the module's attribute, as an engine makes it; the largest relative error."""
    module: Any = importlib.import_module(flashinfer.MODULE)
    operands.out.fill_(float("nan"))
    module.trtllm_batch_decode_with_kv_cache(**arguments)
    return worst(operands.out, reference(operands)).error


def main(what: str) -> None:
    """See the module's docstring."""
    torch.set_num_threads(1)
    for module in (flashinfer.MODULE, "flashinfer.prefill"):
        importlib.import_module(module)
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        no_gpu(CAPABILITY, SM_COUNT, lambda spec: Launchers()),
        open_arena("host_mmap", "cpu") as arena,
    ):
        operands = build(arena, COLUMN, Recipe(LENS, seed=1), "cpu")

        def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return arena.tensor(name, shape, dtype, align=16 if name == "workspace" else None)

        wrong = engine_call(
            operands, allocate, prefill_table=what != "routed", prefill_lens=what == "lengths"
        )
        if what in ("unprotected", "lengths"):
            found["unprotected_error"] = serve(operands, wrong)
        if what != "unprotected":
            hook = flashinfer.install(Router.load(table(Path(folder)), facts=B200), miss="fallback")
            found["said"] = hook.explain(**wrong)
            found["error"] = serve(operands, wrong)
            found["called"] = {f"{route}: {why}": count for (route, why), count in hook.counts.items()}
            hook.uninstall()
        found["overwritten"] = arena.overwritten()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
