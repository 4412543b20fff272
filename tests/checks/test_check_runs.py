"""Every check passes the clean kernel, and catches its planted ones; those that kill do so in a fork."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune.arena.operands import Recipe, build
from autotune.arena.plain import PlainArena
from autotune.checks import registry
from autotune.checks.controls import (
    BY_DEVICE,
    COLUMN,
    CONTROLS,
    CPU,
    CUDA,
    INTERVAL,
    KV_LENS,
    SEED,
    Control,
    Stated,
    clean,
    controls,
)
from autotune.checks.nan_pool import fill_dead_with_nan
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import KvLayout, Shape
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind, Requirement
from autotune.routes.planted import Planted

ENDS_PROCESS = {FailureKind.ILLEGAL_ACCESS, FailureKind.CRASH, FailureKind.HANG}
CLEAN = Planted("planted-clean")

COLUMNS = {
    "fp8 KV": CPU.scaled,
    "one row": Column(Shape(4, 1, 64, 16), PROFILES["fp32"], 1, 1, 256),
    "window": Column(Shape(4, 2, 64, 16, window_left=20), PROFILES["bf16"], 4, 3, 256),
    "window 0": Column(Shape(2, 2, 64, 16, window_left=0), PROFILES["fp32"], 2, 2, 256),
    "page 1": Column(Shape(2, 1, 128, 1), PROFILES["bf16"], 3, 2, 128),
    "long q": Column(Shape(2, 1, 64, 4), PROFILES["fp32"], 9, 2, 256),
    "one query head": Column(Shape(1, 1, 64, 16), PROFILES["bf16"], 2, 2, 256),
    "table without room": Column(Shape(2, 1, 64, 64), PROFILES["bf16"], 4, 2, 64),
    "small head": Column(Shape(4, 2, 16, 16), PROFILES["fp32"], 2, 2, 256),
    **{
        layout.value: Column(Shape(4, 2, 64, 16, kv_layout=layout.value), PROFILES["bf16"], 2, 2, 256)
        for layout in KvLayout
    },
}


def assert_passed(row: CheckResult) -> None:
    assert row.status is CheckStatus.PASSED, row.detail
    assert row.placements == ("tail", "head")
    assert row.launches >= 2
    assert row.worst_error is None or row.worst_error < 0.01


@pytest.mark.parametrize("label", COLUMNS)
def test_clean_kernel_passes_every_check(label: str, make_trial: Any) -> None:
    trial = make_trial(CLEAN, COLUMNS[label], (20, 100))
    ran = 0
    for check in registry.CHECKS:
        if check.applies(trial) is None:
            assert_passed(check.run(trial))
            ran += 1
    assert ran >= 8


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_clean_kernel_is_never_accused(seed: int, dtype: str, make_trial: Any) -> None:
    column = Column(Shape(4, 2, 64, 16), PROFILES[dtype], 3, 3, 512, interval=(2, 5))
    trial = make_trial(CLEAN, column, seed=seed)
    for check in registry.CHECKS:
        if check.applies(trial) is None:
            assert_passed(check.run(trial))


@pytest.mark.parametrize("control", controls(), ids=lambda control: f"{control.check}-{control.name}")
def test_control(control: Control, make_trial: Any, run_forked: Any) -> None:
    trial = make_trial(control.route, control.column, control.kv_lens, seed=SEED)
    if control.expected in ENDS_PROCESS:
        assert run_forked(control.check, trial) is control.expected
        return
    row = registry.get(control.check).run(trial)
    if control.kind is None:
        assert_passed(row)
        limited = control.check in registry.STATES_LIMITS and bool(row.limits)
        assert limited == (control.expected is Stated.LIMIT)
        required = (control.expected.value,) if isinstance(control.expected, Requirement) else ()
        assert row.requires == required
        return
    assert (row.status, row.kind) == (CheckStatus.FAILED, control.expected), row.detail
    assert row.check == control.check and control.check in row.detail
    assert "\n" not in row.detail


@pytest.mark.parametrize(
    "control",
    [c for c in CONTROLS if c.expected not in ENDS_PROCESS and c.name != "planted-canary-write"],
    ids=lambda control: control.name,
)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_detection_does_not_hang_on_the_seed(control: Control, seed: int, make_trial: Any) -> None:
    trial = make_trial(control.route, control.column, control.kv_lens, seed=seed)
    assert registry.get(control.check).run(trial).kind is control.kind


def test_padding_of_512_bytes_makes_tail_padding_pass(make_trial: Any, run_forked: Any) -> None:
    row = run_forked("reference", make_trial(Planted("planted-tail-padding"), slack=512))
    assert isinstance(row, CheckResult)
    assert row.status is CheckStatus.PASSED and row.slack == 512


def test_a_write_into_granted_padding_is_still_found(make_trial: Any, run_forked: Any) -> None:
    row = run_forked("reference", make_trial(Planted("planted-write-past-end"), slack=8192))
    assert isinstance(row, CheckResult)
    assert row.kind is FailureKind.OUT_OF_BOUNDS_WRITE and row.detail.startswith("out: 8192 bytes")


def test_every_check_has_a_control_of_its_own() -> None:
    for device, known in BY_DEVICE.items():
        wanted = set(registry.runs(INTERVAL, device))
        assert {control.check for control in known} == wanted
        # --only NAME must show the check failing without a new child, too
        quick = {control.check for control in known if control.expected not in ENDS_PROCESS}
        assert quick == wanted
        assert len({control.name for control in known}) == len(known)
        assert all(control.name == control.route.name for control in controls(device=device))


def test_clean_controls_come_first_and_once() -> None:
    seen: set[tuple[str, str]] = set()
    for control in controls():
        key = (control.check, control.column.id)
        if control.expected is None:
            assert key not in seen
            seen.add(key)
        assert key in seen
    assert clean(CONTROLS[0]).expected is None


def test_controls_of_one_check() -> None:
    assert {control.check for control in controls("strides")} == {"strides"}
    with pytest.raises(registry.UnknownCheckError, match="the checks are reference, "):
        controls("nonsense")
    for only, device in (("soak", "cpu"), ("graph_replay", "cpu")):
        with pytest.raises(registry.UnknownCheckError, match=f"'{only}' has no controls for {device}"):
            controls(only, device)
    assert {control.column for control in controls("scales", "cuda")} == {CUDA.scaled}
    with pytest.raises(ValueError, match="'tpu', only for cpu, cuda"):
        controls(device="tpu")


def test_interior_batch_is_for_intervals_only_and_graph_replay_for_cuda() -> None:
    assert registry.runs(INTERVAL, "cuda") == registry.names()
    assert set(registry.names()) - set(registry.runs(INTERVAL, "cpu")) == {"graph_replay"}
    assert set(registry.names()) - set(registry.runs(COLUMN, "cuda:1")) == {"interior_batch"}
    for column in (INTERVAL, COLUMN):
        assert set(registry.runs(column, "cuda")) - set(registry.expected(column, "cuda")) == {
            "extreme_logits"
        }
    assert registry.get("interior_batch").applies is not None


def test_a_nan_in_the_tail_is_a_requirement_and_not_a_failure(make_trial: Any) -> None:
    row = registry.get("nan_pool").run(make_trial(Planted("planted-nan-tail")))
    assert (row.status, row.requires) == (CheckStatus.PASSED, ("finite_pool",))
    assert row.placements == ("tail", "head")


def test_nan_pool_leaves_no_finite_dead_slot() -> None:
    with PlainArena() as arena:
        operands = build(arena, COLUMN, Recipe((3, 17, 32), seed=0), "cpu")
        fill_dead_with_nan(operands)
        for cache in (operands.step.k, operands.step.v):
            # 1 + 2 + 2 live pages of 16 slots, 52 of them live
            assert int(torch.isfinite(cache).all(dim=-1).all(dim=-1).sum()) == 52


def test_not_applicable_checks_say_why(make_trial: Any) -> None:
    reason = registry.get("scales").applies(make_trial(CLEAN))
    assert reason is not None and "bf16 KV is not quantised" in reason
    reason = registry.get("graph_replay").applies(make_trial(CLEAN))
    assert reason is not None and "no graphs" in reason
    trial = make_trial(CLEAN, COLUMNS["table without room"], (64,))
    reason = registry.get("table_garbage").applies(trial)
    assert reason is not None and "live" in reason
    reason = registry.get("interior_batch").applies(make_trial(CLEAN))
    assert reason is not None and "interval" in reason


@pytest.mark.parametrize("pad_value", [0, 1, 2, 3, 7])
def test_padded_rows_with_any_pad_value(pad_value: int, make_trial: Any) -> None:
    seen: list[list[int]] = []

    class Watching(Planted):
        def open(self, capacity: Any, allocate: Any) -> Any:
            session = super().open(capacity, allocate)
            plain = session.prepare

            def prepare(step: Any) -> None:
                seen.append(step.seq_lens.tolist())
                plain(step)
                session.lens = [max(1, n) for n in session.lens]

            session.prepare = prepare  # type: ignore[method-assign]
            return session

    row = registry.get("padded_rows").run(make_trial(Watching("planted-clean"), pad_value=pad_value))
    assert_passed(row)
    assert seen[0][-1] == pad_value and seen[1] == [pad_value] * 3
    assert seen[2][-1] == pad_value + 3 and seen[3] == [pad_value + 3] * 3


def test_scattered_pages_says_how_far_it_went(make_trial: Any) -> None:
    row = registry.get("scattered_pages").run(make_trial(CLEAN))
    assert row.limits == ("page ids below 1048577 (4 GiB of K)",)


def test_same_seed_same_launches(make_trial: Any) -> None:
    def launches(seed: int) -> list[str]:
        texts: list[str] = []
        trial = make_trial(CLEAN, INTERVAL, KV_LENS, seed=seed, launched=texts.append)
        for check in registry.CHECKS:
            if check.applies(trial) is None:
                check.run(trial)
        return texts

    first = launches(5)
    assert first == launches(5) != launches(6)
