# ruff: noqa: T201 - what it prints is its result
"""The call that this project began with, in one go: unprotected, behind the contract, with right metadata.

    python scripts/draft_extend_story.py
    python scripts/draft_extend_story.py --gpu h200 [--table tuned_configs/nvidia-h200.sglang.yaml]

A draft-extend step of four query tokens a request goes to the decode kernel with the metadata of a prefill:

1. unprotected, in a child and in guarded memory: the page table as wide as the cached tokens need, then
   lengths without the new tokens;
2. through ``autotune.engines.flashinfer.install(..., miss="fallback")`` over a routing table: the static
   contract refuses the call, the fallback serves it;
3. the same with right metadata: the table's own route is called where it is proven.

``--gpu h200`` calls FlashInfer's kernels in guarded CUDA memory, on the machine that the table was measured
on. On the CPU step 1 is the self-test's planted kernel with that mistake (a real SIGSEGV) and the torch
decode route; steps 2 and 3 are the real hook, contract, router and table, the kernels behind them a stand-in
in fp32, and the table's own facts are taken for this machine's. Exit 0 if all is as told, 1 if not, 2 for a
wrong flag, 3 if this machine is not the table's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autotune.arena.factory import default_kind, open_arena  # noqa: E402
from autotune.arena.operands import Operands, Recipe, build, capacity_of  # noqa: E402
from autotune.checks import controls, oracle  # noqa: E402
from autotune.domain.cell import Column  # noqa: E402
from autotune.domain.dtypes import DTypes  # noqa: E402
from autotune.domain.shape import Shape  # noqa: E402
from autotune.domain.verdict import FailureKind  # noqa: E402
from autotune.engines import flashinfer  # noqa: E402
from autotune.engines.context_kernels import DEPLOYABLE  # noqa: E402
from autotune.hardware.collect import collect  # noqa: E402
from autotune.hardware.errors import HardwareError  # noqa: E402
from autotune.router import Router  # noqa: E402
from autotune.routes.flashinfer.layout import hnd  # noqa: E402
from autotune.routes.flashinfer.masks import fill_causal_mask  # noqa: E402
from autotune.routes.planted_live import MISTAKES, name_of  # noqa: E402
from autotune.table.load import load_table  # noqa: E402
from autotune.worker.base import WorkerError  # noqa: E402
from autotune.worker.jobs import ProveJob, prove  # noqa: E402
from autotune.worker.worker import Worker  # noqa: E402

if TYPE_CHECKING:
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Step

TABLE = ROOT / "tuned_configs" / "nvidia-h200.sglang.yaml"
Q_LEN, PAGE = 4, 64
SHAPE, DTYPES = Shape(8, 1, 128, PAGE), DTypes("bf16", "bf16", "bf16")
# 257 tokens are five pages; without the new ones they are four
LENS = (100, 61, 190, 257)
NARROW = {"cpu": "planted-narrow-table", "cuda": "planted-xqa-narrow-table"}
DECODE = {"cpu": "torch-splitkv", "cuda": "xqa-decode"}
WORKSPACE_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
# XQA's semaphores: zero before the first call. The rest of a workspace may hold anything.
ZEROED_BYTES = 8 << 20
ALIGN = 16  # what XQA and fmha-v2 ask for
SEED = 20260501
STEP_TIMEOUT_S = 60.0
WIDTH = 110


@dataclass(frozen=True)
class Told:
    """One line of the story, and whether it is what was to be shown."""

    says: str
    good: bool


def unprotected(facts: Facts) -> list[Told]:
    """The two mistakes of a prefill's metadata, each in a child of its own kind.

    Raises:
        WorkerError: no child can be had.
    """
    device = facts.device
    control = next(each for each in controls.BY_DEVICE[device] if each.name == NARROW[device])
    lengths = name_of("old-lengths", DECODE[device])
    cases = (
        (control.name, control.check, FailureKind.ILLEGAL_ACCESS, "page table of the cached tokens"),
        (lengths, "reference", FailureKind.WRONG_OUTPUT, "lengths without the new tokens"),
    )
    told = []
    with Worker(device, step_timeout_s=STEP_TIMEOUT_S) as worker:
        for route, check, expected, what in cases:
            job = ProveJob(
                route=route,
                check=check,
                column=replace(control.column, q_len=Q_LEN).to_dict(),
                facts=facts.to_dict(),
                kv_lens=controls.KV_LENS,
                seed=SEED,
                device=device,
                arena_kind=default_kind(device),
            )
            row = prove(worker, job)
            kind = "passed" if row.kind is None else row.kind.value
            told.append(Told(f"{what}, {route}: {kind}: {row.detail}", row.kind is expected))
    return told


def serve(operands: Operands, arguments: dict[str, Any]) -> tuple[float, ...]:
    """One call by the module's attribute, as an engine makes it; each request's largest relative error."""
    module: Any = importlib.import_module(flashinfer.MODULE)
    operands.out.fill_(float("nan"))
    module.trtllm_batch_decode_with_kv_cache(**arguments)
    out, right = operands.out.double(), oracle.reference(operands)
    # NaN, which is what was not written, is larger than any bound
    off = ((out - right).norm(dim=-1) / right.norm(dim=-1)).nan_to_num(torch.inf)
    return tuple(off.view(len(LENS), -1).amax(dim=1).tolist())


def engine_call(
    operands: Operands, step: Step, workspace: torch.Tensor, mask: torch.Tensor
) -> dict[str, Any]:
    """What an engine hands to FlashInfer's decode function for ``step``."""
    return {
        "query": step.q,
        "kv_cache": (hnd(step.k), hnd(step.v)),
        "workspace_buffer": workspace,
        "block_tables": step.page_table,
        "seq_lens": step.seq_lens,
        "max_seq_len": operands.column.max_context,
        "bmm1_scale": step.sm_scale,
        "bmm2_scale": 1.0,
        "window_left": -1,
        "out": operands.out,
        "q_len_per_req": Q_LEN,
        "mask": mask,
    }


def protected(router: Router, max_context: int, device: str) -> list[Told]:
    """Steps 2 and 3: one set of operands, with a prefill's page table and with the right one."""
    column = Column(SHAPE, DTYPES, Q_LEN, len(LENS), max_context)
    recipe, limit = Recipe(LENS, seed=1), oracle.bound(column)
    hook = flashinfer.install(router, miss="fallback", attests=["causal_mask"])
    try:
        with open_arena(default_kind(device), device) as arena:

            def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
                return arena.tensor(name, shape, dtype, align=ALIGN)

            operands = build(arena, column, recipe, device)
            workspace, scratch = (
                allocate(name, (WORKSPACE_BYTES[device],), torch.uint8) for name in ("workspace", "scratch")
            )
            workspace[:ZEROED_BYTES].zero_()
            hook.scratch.give(scratch)
            mask = allocate("mask", (len(LENS), Q_LEN, 2 * -(-Q_LEN // 32)), torch.uint16)
            fill_causal_mask(mask)
            narrow = MISTAKES["narrow-table"].step(
                operands.step, capacity_of(column, recipe, device), allocate
            )
            told = []
            for step, why, covered in (
                (narrow, "contract", len(LENS) - 1),  # the longest loses its last token, and no more
                (operands.step, "proven_faster", len(LENS)),
            ):
                call, before = engine_call(operands, step, workspace, mask), dict(hook.counts)
                said, errors = hook.explain(**call), serve(operands, call)
                called = [key for key, count in hook.counts.items() if count != before.get(key, 0)]
                strayed = arena.overwritten()
                right = sum(off <= limit for off in errors[:covered])
                told.append(
                    Told(
                        f"{said}\n   called {', '.join(route for route, _ in called)}: {right} of "
                        f"{len(LENS)} requests right (error {max(errors[:covered]):.2g}, bound {limit:.2g}), "
                        f"{len(strayed)} writes outside",
                        right == covered
                        and max(errors) < torch.inf
                        and [reason for _, reason in called] == [why]
                        and not strayed,
                    )
                )
    finally:
        hook.uninstall()
    return told


def main(given: Sequence[str] | None = None) -> int:
    """Tell it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--gpu", choices=("cpu", "h200"), default="cpu", help="cpu (default): the kernels' stand-ins"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="a routing table (the shipped H200 one)")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    device = "cpu" if options.gpu == "cpu" else "cuda"
    with contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)  # what the hook would log is told
        try:
            here = collect(device, threads=1)
            facts = load_table(options.table).facts if device == "cpu" else here
        except (HardwareError, ValueError, OSError) as error:
            print(f"draft_extend_story: {' '.join(str(error).split())}", file=sys.stderr)
            return 3 if isinstance(error, HardwareError) else 2
        router = Router.load(options.table, facts=facts)
        entries = () if router.table is None else router.table.entries
        entry = next((e for e in entries if (e.shape, e.dtypes, e.q_len) == (SHAPE, DTYPES, Q_LEN)), None)
        if entry is not None and entry.fallback not in DEPLOYABLE:
            print(
                f"draft_extend_story: {options.table}: its fallback {entry.fallback} plans on the host, "
                f"which install() cannot do; give a table with {' or '.join(sorted(DEPLOYABLE))}",
                file=sys.stderr,
            )
            return 2
        if not router.status.active or entry is None:
            reason = f"no entry of {SHAPE}, q_len {Q_LEN}" if router.status.active else router.status.reason
            print(f"draft_extend_story: {options.table}: {reason}", file=sys.stderr)
            return 3
        good = True
        try:
            for each in unprotected(here):
                good &= tell(f"1 unprotected: {each.says}", each.good)
            if device == "cpu":
                from tests.engines import standin

                stack.enter_context(standin.installed())
            names = ("2 refused", "3 routed")
            for name, each in zip(names, protected(router, entry.max_context, device), strict=True):
                good &= tell(f"{name}: {each.says}", each.good)
        except WorkerError as error:
            print(f"draft_extend_story: {error}", file=sys.stderr)
            return 1
        except Exception as error:  # whatever a library raises: what was told before stands
            print(
                f"draft_extend_story: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr
            )
            return 1
    return 0 if good else 1


def tell(says: str, good: bool) -> bool:
    """Print one line of the story; ``good`` again."""
    for line in (*says.splitlines(), *(() if good else ("   NOT AS TOLD",))):
        print(textwrap.fill(line, WIDTH, subsequent_indent="     ", break_long_words=False), flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
