"""``poisoned_output``: every element of ``out`` is written, nothing around it is, and no input is.

``out`` lies between guard rows in a larger tensor, as an engine's output buffer does, so that a row written
too far is seen even where it hits no guard of the arena. Two poisons tell faults apart: what still holds the
NaN poison *and* the finite one was not written; what is NaN over both the kernel wrote; what is NaN only over
NaN was read from ``out`` first.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from autotune.arena.contents import bits
from autotune.arena.operands import Operands, Recipe
from autotune.checks import lengths, oracle
from autotune.checks.blame import FindingError
from autotune.checks.catalogue import VERSIONS
from autotune.checks.launch import Opened, Stage, conduct
from autotune.checks.poison import POISON_BITS, POISON_MAGIC, poison, poisoned
from autotune.domain.verdict import FailureKind

if TYPE_CHECKING:
    from autotune.checks.base import Trial
    from autotune.domain.verdict import CheckResult

GUARD_REQUESTS = 2  # requests' worth of guard rows on either side


class PoisonedOutput:
    """One ragged batch, launched over a NaN poison and over a finite one."""

    name = "poisoned_output"
    version = VERSIONS[name]

    def applies(self, trial: Trial) -> str | None:
        """Always."""
        return None

    def run(self, trial: Trial) -> CheckResult:
        """See :class:`autotune.checks.base.Check`."""
        return conduct(self, trial, self._launches)

    def _launches(self, stage: Stage) -> None:
        rng = random.Random(stage.seed(0))
        kv_lens = tuple(lengths.short(stage.trial, rng, stage.trial.column.batch_size))
        recipe = Recipe(kv_lens, seed=stage.seed(1))
        with stage.opened(recipe) as opened:
            operands = opened.build(recipe)
            guarded = _with_guard_rows(opened, operands)
            ref = oracle.reference(operands)
            inputs = _inputs(operands)
            before = {name: bits(tensor).clone() for name, tensor in inputs.items()}

            left = []
            for label, patterns in (("NaN poison", POISON_BITS), ("finite poison", POISON_MAGIC)):
                poison(guarded, patterns)
                opened.fire(operands, label, patterns)
                text = stage.describe(label, kv_lens)
                _unchanged(inputs, before, text)
                _guards_intact(guarded, operands, patterns, text)
                left.append((poisoned(operands.out, patterns), ~torch.isfinite(operands.out)))
            (nan_left, nan_bad), (magic_left, magic_bad) = left
            text = stage.describe("both poisons", kv_lens)
            for mask, kind, what in (
                (nan_left & magic_left, FailureKind.UNWRITTEN_OUTPUT, "left unwritten"),
                (magic_bad, FailureKind.NAN_LEAK, "not finite, written by the kernel"),
                (
                    nan_bad,
                    FailureKind.NAN_LEAK,
                    "not finite where out held NaN: out is read before it is written",
                ),
            ):
                if bool(mask.any()):
                    row, head, _ = (int(i) for i in mask.nonzero()[0])
                    count = f"{int(mask.sum())} of {mask.numel()} elements {what}"
                    raise FindingError(kind, f"{count}, first at {stage.place(operands, row, head)} ({text})")
            opened.judge(operands, "finite poison", ref)


def _with_guard_rows(opened: Opened, operands: Operands) -> torch.Tensor:
    """Move ``out`` into the middle of a larger tensor, which is returned."""
    out, around = operands.out, GUARD_REQUESTS * operands.column.q_len
    wide = opened.arena.tensor("out_with_guard_rows", (out.shape[0] + 2 * around, *out.shape[1:]), out.dtype)
    operands.out = wide[around : around + out.shape[0]]
    return wide


def _guards_intact(wide: torch.Tensor, operands: Operands, patterns: dict[int, int], text: str) -> None:
    around = GUARD_REQUESTS * operands.column.q_len
    touched = ~poisoned(wide, patterns).flatten(1).all(dim=1)
    touched[around : around + operands.out.shape[0]] = False
    if bool(touched.any()):
        row = int(touched.nonzero()[0]) - around
        raise FindingError(
            FailureKind.OUT_OF_BOUNDS_WRITE,
            f"row {row} written, outside the output's rows 0..{operands.out.shape[0] - 1} ({text})",
        )


def _inputs(operands: Operands) -> dict[str, torch.Tensor]:
    step = operands.step
    k_blocks, v_blocks = step.kv_block_scales or (None, None)
    optional = {"k_block_scales": k_blocks, "v_block_scales": v_blocks, "sinks": step.sinks}
    return {
        **{name: tensor for name, tensor in optional.items() if tensor is not None},
        "q": step.q,
        "k": step.k,
        "v": step.v,
        "page_table": step.page_table,
        "seq_lens": step.seq_lens,
    }


def _unchanged(inputs: dict[str, torch.Tensor], before: dict[str, torch.Tensor], text: str) -> None:
    for name, tensor in inputs.items():
        changed = int((bits(tensor) != before[name]).sum())
        if changed:
            raise FindingError(
                FailureKind.OUT_OF_BOUNDS_WRITE,
                f"{changed} elements of the input {name} were overwritten ({text})",
            )
