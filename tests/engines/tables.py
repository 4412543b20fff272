"""A table of one SGLang layer kind on an H200: batch sizes 1 to 16, q_len 4, two rows up to 512 tokens."""

from __future__ import annotations

from pathlib import Path

from autotune.domain.decision import Decision, Reason
from autotune.domain.dtypes import DTypes
from autotune.domain.shape import Shape
from autotune.router import Router
from autotune.table.build import build_table
from autotune.table.dump import dump_table
from autotune.table.model import Policy, RoutingTable
from tests.table.samples import CUDA_FACTS, GENERATED, decided

KIND = Shape(8, 1, 128, 64)
BF16 = DTypes("bf16", "bf16", "bf16")
XQA, FMHA = "xqa-decode", "fmha-v2"
FAMILIES = {XQA: "decode", FMHA: "context"}
FASTER = Decision(XQA, Reason.PROVEN_FASTER, "", 1.3, 1.4, 1.0)
SLOWER = Decision(None, Reason.NOT_FASTER, vs_stock=1.1)
UNSAFE = Decision(None, Reason.CANDIDATE_UNSAFE)
UNPROVEN = Decision(None, Reason.UNPROVEN)
# batch -> decisions of the rows up to 256 and up to 512
PLAN = {
    1: (SLOWER, SLOWER),
    2: (FASTER, FASTER),
    4: (SLOWER, FASTER),
    8: (UNSAFE, FASTER),
    16: (UNPROVEN, UNPROVEN),
}


def table(engine: str = "sglang", max_context: int = 512) -> RoutingTable:
    """The table of :data:`PLAN`."""
    cells = []
    for batch, rows in PLAN.items():
        for (low, high), decision in zip(((4, 256), (257, 512)), rows, strict=True):
            cells.append(
                decided(
                    batch,
                    (low, high),
                    decision,
                    shape=KIND,
                    dtypes=BF16,
                    max_context=max_context,
                    fallback=FMHA,
                )
            )
    return build_table(
        cells,
        facts=CUDA_FACTS,
        generated=GENERATED,
        policy=Policy(engine, XQA, "graph", 0.03, 0.01, 0.05),
        families=FAMILIES,
    )


def write(path: Path, engine: str = "sglang") -> Path:
    """Its file."""
    path.write_bytes(dump_table(table(engine)))
    return path


def router(path: Path, engine: str = "sglang") -> Router:
    """As a process on that H200 loads it."""
    return Router.load(write(path, engine), facts=CUDA_FACTS)
