"""Columns with an nvfp4 KV cache or attention sinks: a right kernel passes every check, wrong ones do not.

The kernels here read the formats by their definitions, not through the arena's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from autotune.arena.nvfp4 import LEVELS
from autotune.checks import oracle, registry
from autotune.checks.base import Trial
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.domain.verdict import CheckStatus, FailureKind
from autotune.routes.base import Allocate, Capacity, Capture, Family, Need
from autotune.routes.planted import CleanSession

MakeTrial = Callable[..., Trial]
NVFP4 = Column(Shape(4, 2, 64, 16, kv_layout="fused-hnd"), PROFILES["nvfp4"], 3, 3, 256)
SINKS = Column(Shape(4, 2, 64, 16, sinks=True), PROFILES["bf16"], 3, 3, 256)
WINDOW = replace(SINKS, shape=replace(SINKS.shape, window_left=20))
KV_LENS = (60, 250)


class Right(CleanSession):
    """fp32 attention that knows sinks and nvfp4, V's scales in order."""

    low_first = True

    def block_scale(self, which: int, page: int, slot: int) -> torch.Tensor:
        """[num_kv_heads, blocks] of one token."""
        assert self.step.kv_block_scales is not None
        return self.step.kv_block_scales[which][page, slot].float()

    def cache(self, which: int, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
        data = (self.step.k, self.step.v)[which]
        rows = []
        signed = torch.tensor([*LEVELS, *(-level for level in LEVELS)])
        for token in range(kv_len):
            page, slot = int(pages[token // self.shape.page_size]), token % self.shape.page_size
            packed = data[page, slot].long()
            halves = (packed & 15, packed >> 4) if self.low_first else (packed >> 4, packed & 15)
            values = signed[torch.stack(halves, dim=-1).flatten(1)]
            rows.append(values * self.block_scale(which, page, slot).repeat_interleave(16, dim=1))
        return torch.stack(rows)

    def keys(self, row: int, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
        quantised = self.column.dtypes.kv == "nvfp4"
        return self.cache(0, pages, kv_len) if quantised else super().keys(row, pages, kv_len)

    def values(self, row: int, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
        quantised = self.column.dtypes.kv == "nvfp4"
        return self.cache(1, pages, kv_len) if quantised else super().values(row, pages, kv_len)

    def sinks(self) -> torch.Tensor:
        """[num_qo_heads]; -inf is none."""
        sinks = self.step.sinks
        return torch.full((self.shape.num_qo_heads,), -torch.inf) if sinks is None else sinks

    def attend(self, row: int) -> torch.Tensor:
        shape, kv_len = self.shape, self.kv_len(row)
        pages = self.page_ids(row, -(-kv_len // shape.page_size))
        k, v = self.keys(row, pages, kv_len), self.values(row, pages, kv_len)
        k, v = (half.repeat_interleave(shape.group, dim=1) for half in (k, v))
        logits = torch.einsum("ihd,nhd->hin", self.queries(row), k) * self.scale()
        for i in range(self.q_len):
            end = self.visible(kv_len, i)
            first = max(0, end - 1 - shape.window_left) if shape.window_left >= 0 else 0
            logits[:, i, :first] = -torch.inf
            logits[:, i, end:] = -torch.inf
        sinks = self.sinks()[:, None, None].expand(-1, self.q_len, 1)
        weights = torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1)[..., :-1]
        return torch.einsum("hin,nhd->ihd", weights, v) * self.value_scale()


class Interleaved(Right):
    """As engines keep V's scales for the trtllm-gen kernels."""

    def block_scale(self, which: int, page: int, slot: int) -> torch.Tensor:
        if which == 0:
            return super().block_scale(which, page, slot)
        assert self.step.kv_block_scales is not None
        scales = self.step.kv_block_scales[1][page]  # [page_size, heads, blocks]
        count = scales.shape[2]
        flat = scales.transpose(0, 1).flatten(1).float()  # [heads, page_size x blocks]
        places = [slot // 4 * 4 * count + block * 4 + slot % 4 for block in range(count)]
        return flat[:, places]


class HighFirst(Right):
    """The two codes of a byte are taken for each other."""

    low_first = False


class ScalesSwapped(Right):
    """K under V's block scales and V under K's."""

    def block_scale(self, which: int, page: int, slot: int) -> torch.Tensor:
        return super().block_scale(1 - which, page, slot)


class NextBlock(Right):
    """The block scales are read one block further."""

    def block_scale(self, which: int, page: int, slot: int) -> torch.Tensor:
        return super().block_scale(which, page, slot).roll(-1, dims=1)


class NoSinks(Right):
    """Sinks are ignored without an error, as some kernels do."""

    def sinks(self) -> torch.Tensor:
        return torch.full((self.shape.num_qo_heads,), -torch.inf)


class SinkOfAnotherHead(Right):
    """Sinks are indexed by KV head."""

    def sinks(self) -> torch.Tensor:
        assert self.step.sinks is not None
        return self.step.sinks[torch.arange(self.shape.num_qo_heads) // self.shape.group]


class ScaledSinks(Right):
    """The softmax scale is applied to the sink too."""

    def sinks(self) -> torch.Tensor:
        return super().sinks() * self.scale()


class RoundsQuery(Right):
    """The query is cast to e4m3, as FlashInfer's SM90 kernels want it beside an fp8 cache."""

    def queries(self, row: int) -> torch.Tensor:
        return super().queries(row).to(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Under:
    """A session as a route."""

    session: type[CleanSession]
    name: str = "under-test"
    family: Family = Family.DECODE
    capture: Capture = Capture.NO
    needs: frozenset[Need] = frozenset()
    deterministic: bool = True
    version: int = 1

    def supports(self, column: Column, facts: Facts) -> str | None:
        return None

    def open(self, capacity: Capacity, allocate: Allocate) -> CleanSession:
        return self.session(capacity, allocate)


def facts(interleaved: bool) -> Facts:
    return Facts("cpu", {"compute_capability": "10.0"} if interleaved else {}, {})


RIGHT = {
    "nvfp4": (Right, NVFP4, False),
    "nvfp4 interleaved": (Interleaved, NVFP4, True),
    "nvfp4 nhd": (Right, replace(NVFP4, shape=replace(NVFP4.shape, kv_layout="separate-nhd")), False),
    "sinks": (Right, SINKS, False),
    "sinks and window": (Right, WINDOW, False),
}
WRONG = {
    "high half first": (HighFirst, NVFP4, False),
    "scales swapped": (ScalesSwapped, NVFP4, False),
    "next block's scale": (NextBlock, NVFP4, False),
    "in order where interleaved": (Right, NVFP4, True),
    "interleaved where in order": (Interleaved, NVFP4, False),
    "no sinks": (NoSinks, SINKS, False),
    "sink of another head": (SinkOfAnotherHead, SINKS, False),
    "scaled sinks": (ScaledSinks, SINKS, False),
}


@pytest.mark.parametrize("label", RIGHT)
def test_every_check_passes_a_right_kernel(label: str, make_trial: MakeTrial) -> None:
    session, column, interleaved = RIGHT[label]
    trial = replace(make_trial(Under(session), column, KV_LENS), facts=facts(interleaved))
    ran = []
    for check in registry.CHECKS:
        if check.applies(trial) is not None:
            continue
        row = check.run(trial)
        assert row.status is CheckStatus.PASSED, (check.name, row.detail)
        assert row.worst_error is None or row.worst_error < oracle.bound(column) / 2
        ran.append(check.name)
    assert {"reference", "position_coded", "nan_pool", "table_garbage", "poisoned_output"} <= set(ran)
    assert ("scales" in ran) == (column is not SINKS and column is not WINDOW)


@pytest.mark.parametrize("label", WRONG)
def test_a_wrong_one_is_caught(label: str, make_trial: MakeTrial) -> None:
    session, column, interleaved = WRONG[label]
    for name in ("reference", "position_coded"):
        trial = replace(make_trial(Under(session), column, KV_LENS), facts=facts(interleaved))
        row = registry.get(name).run(trial)
        if row.status is CheckStatus.FAILED:
            assert row.kind is FailureKind.WRONG_OUTPUT
            return
    pytest.fail("neither reference nor position_coded saw it")


@pytest.mark.parametrize("label", WRONG)
def test_reference_alone_sees_it_far_outside_the_bound(label: str, make_trial: MakeTrial) -> None:
    session, column, interleaved = WRONG[label]
    trial = replace(make_trial(Under(session), column, KV_LENS), facts=facts(interleaved))
    row = registry.get("reference").run(trial)
    assert row.status is CheckStatus.FAILED
    assert row.worst_error is not None and row.worst_error > 5 * oracle.bound(column)


def test_rounding_the_query_is_no_fault_of_ordinary_logits_beside_sinks(make_trial: MakeTrial) -> None:
    column = replace(SINKS, shape=replace(SINKS.shape, head_dim=128, head_dim_vo=128))
    row = registry.get("extreme_logits").run(make_trial(Under(RoundsQuery), column, KV_LENS))
    assert row.status is CheckStatus.PASSED, row.detail
    # e4m3 ends at 448; torch's cast makes NaN of more
    assert set(row.limits) == {f"{sign} logits up to 1000 in magnitude" for sign in ("negative", "positive")}
    right = registry.get("extreme_logits").run(make_trial(Under(Right), column, KV_LENS))
    assert (right.status, right.limits) == (CheckStatus.PASSED, ())
