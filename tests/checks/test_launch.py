"""How launches are told apart from findings, and the route's faults from ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from autotune.arena.base import ArenaError, Placement
from autotune.arena.contents import bits
from autotune.arena.operands import Recipe
from autotune.checks import oracle, registry
from autotune.checks.blame import OperandsError, is_device_error, is_unfit
from autotune.checks.controls import INTERVAL
from autotune.checks.launch import Stage, Tally, conduct
from autotune.checks.poison import poison, poisoned
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.domain.verdict import CheckStatus, FailureKind, Status, UnprovenReason, conclude
from autotune.routes.arithmetic import Arithmetic
from autotune.routes.base import Need
from autotune.routes.contract import ContractError
from autotune.routes.planted import CleanSession, Planted

REFERENCE = registry.get("reference")


@dataclass(frozen=True)
class Hooked(Planted):
    """The clean kernel with something done at a given point."""

    name: str = "planted-clean"
    at: str = "run"
    error: Exception | None = None

    def open(self, capacity: Any, allocate: Any) -> CleanSession:
        if self.at == "open" and self.error:
            raise self.error
        session = super().open(capacity, allocate)
        if self.error:
            setattr(session, self.at, self._raise)
        return session

    def _raise(self, *_: Any) -> None:
        assert self.error is not None
        raise self.error


@pytest.mark.parametrize("at", ["prepare", "run", "close"])
def test_an_exception_of_the_route_is_a_launch_error(at: str, make_trial: Any) -> None:
    row = REFERENCE.run(make_trial(Hooked(at=at, error=NotImplementedError("no such\n page size"))))
    assert (row.status, row.kind) == (CheckStatus.FAILED, FailureKind.LAUNCH_ERROR)
    assert "NotImplementedError: no such page size" in row.detail


def test_a_session_that_cannot_be_opened_accuses_nobody(make_trial: Any) -> None:
    row = REFERENCE.run(make_trial(Hooked(at="open", error=ValueError("no plan for\n this head_dim"))))
    assert (row.status, row.reason, row.kind) == (CheckStatus.UNPROVEN, UnprovenReason.INFRASTRUCTURE, None)
    assert "open for" in row.detail and "ValueError: no plan for this head_dim" in row.detail


@pytest.mark.parametrize("at", ["open", "prepare", "run"])
@pytest.mark.parametrize("kind", [ImportError, OSError, RuntimeError])
def test_a_library_that_cannot_be_loaded_accuses_nobody(
    at: str, kind: type[Exception], make_trial: Any
) -> None:
    error = kind("libcublas.so.12: cannot open shared object file")
    row = REFERENCE.run(make_trial(Hooked(at=at, error=error)))
    assert (row.status, row.reason) == (CheckStatus.UNPROVEN, UnprovenReason.INFRASTRUCTURE)
    assert "libcublas.so.12" in row.detail


def test_operands_of_ours_that_break_the_contract_never_reach_the_route(make_trial: Any) -> None:
    def body(stage: Stage) -> None:
        recipe = Recipe((64, 65, 66), seed=1)
        with stage.opened(recipe) as opened:
            operands = opened.build(recipe)
            operands.step.page_table[0, 0] = 10_000
            opened.fire(operands, "a page that the pool does not have")

    trial = make_trial(Hooked(at="prepare", error=AssertionError("launched all the same")))
    with pytest.raises(OperandsError, match=r"rule table_entries: page_table\[0, 0\] is 10000"):
        conduct(REFERENCE, trial, body)


def test_a_route_that_refuses_by_its_contract_is_refused(make_trial: Any) -> None:
    row = REFERENCE.run(make_trial(Hooked(at="open", error=ContractError("grid", "batch_size is 70000"))))
    assert (row.status, row.kind, row.launches) == (CheckStatus.REFUSED, None, 0)
    assert row.detail == "contract rule grid: batch_size is 70000"
    verdict = conclude([row], ["reference", "strides"])
    assert (verdict.status, verdict.check) == (Status.REFUSED, "reference")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("host"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("plan failed: std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
        ArenaError("no address space"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("at", ["open", "run"])
def test_running_out_of_memory_accuses_nobody(error: Exception, at: str, make_trial: Any) -> None:
    row = REFERENCE.run(make_trial(Hooked(at=at, error=error)))
    assert (row.status, row.reason) == (CheckStatus.UNPROVEN, UnprovenReason.OUT_OF_MEMORY)
    assert row.kind is None and row.detail


def test_real_memory_exhaustion_is_recognised(make_trial: Any) -> None:
    class Greedy(Planted):
        def open(self, capacity: Any, allocate: Any) -> CleanSession:
            torch.empty(2**60, dtype=torch.uint8)
            raise AssertionError("an exbibyte was to be had")

    row = REFERENCE.run(make_trial(Greedy("planted-clean")))
    assert row.reason is UnprovenReason.OUT_OF_MEMORY


def test_an_arena_that_cannot_be_opened_accuses_nobody(make_trial: Any) -> None:
    def none(placement: object) -> Any:
        raise ArenaError("no address space")

    row = REFERENCE.run(make_trial(Planted("planted-clean"), make_arena=none))
    assert row.reason is UnprovenReason.OUT_OF_MEMORY


def test_a_device_error_is_the_workers(make_trial: Any) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert is_device_error(error)
    for at in ("open", "run"):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            REFERENCE.run(make_trial(Hooked(at=at, error=error)))


def test_what_the_oracle_does_not_model_is_unproven(make_trial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object) -> Any:
        raise NotImplementedError("the oracle does not model ALiBi")

    monkeypatch.setattr(oracle, "reference", unknown)
    column = Column(Shape(4, 2, 64, 16), PROFILES["bf16"], 1, 1, 64)
    for check in registry.CHECKS:
        trial = make_trial(Planted("planted-clean"), column, (64,))
        if check.applies(trial) is None and check.name != "position_coded":  # half of it needs no reference
            row = check.run(trial)
            assert (row.status, row.reason) == (CheckStatus.UNPROVEN, UnprovenReason.INFRASTRUCTURE)
            assert "ALiBi" in row.detail


def test_a_fault_of_ours_is_not_the_routes(make_trial: Any) -> None:
    def body(stage: Stage) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        conduct(REFERENCE, make_trial(Planted("planted-clean")), body)


def test_launches_are_announced_before_they_are_made(make_trial: Any) -> None:
    events: list[str] = []

    class Watching(Planted):
        def open(self, capacity: Any, allocate: Any) -> CleanSession:
            session = super().open(capacity, allocate)
            plain = session.run

            def run(out: torch.Tensor) -> None:
                events.append("run")
                assert bool(poisoned(out).all())
                plain(out)

            session.run = run  # type: ignore[method-assign]
            return session

    trial = make_trial(Watching("planted-clean"), launched=events.append)
    row = REFERENCE.run(trial)
    runs = [index for index, event in enumerate(events) if event == "run"]
    assert row.launches == len(runs) > 0
    for index in runs:
        assert events[index - 1].startswith("reference/") and "kv_lens" in events[index - 1]


@pytest.mark.parametrize(("needs", "given"), [(frozenset(), False), (frozenset({Need.HOST_KV_LENS}), True)])
def test_host_lengths_only_for_routes_that_need_them(
    needs: frozenset[Need], given: bool, make_trial: Any
) -> None:
    seen: list[bool] = []

    class Watching(Planted):
        def open(self, capacity: Any, allocate: Any) -> CleanSession:
            session = super().open(capacity, allocate)
            plain = session.prepare

            def prepare(step: Any) -> None:
                seen.append(step.host_kv_lens is not None)
                plain(step)

            session.prepare = prepare  # type: ignore[method-assign]
            return session

    route = Watching("planted-clean")
    object.__setattr__(route, "needs", needs)
    trial = make_trial(route)
    for check in registry.CHECKS:
        if check.applies(trial) is None:
            check.run(trial)
    assert set(seen) == {given}


def test_sessions_of_an_interval_are_opened_for_its_upper_end(make_trial: Any) -> None:
    seen: list[int] = []

    class Watching(Planted):
        def open(self, capacity: Any, allocate: Any) -> CleanSession:
            seen.append(capacity.max_batch_size)
            return super().open(capacity, allocate)

    trial = make_trial(Watching("planted-clean"), INTERVAL)
    for check in registry.CHECKS:
        if check.applies(trial) is None:
            check.run(trial)
    assert set(seen) == {5}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_poison_is_a_nan_that_arithmetic_does_not_make(dtype: torch.dtype) -> None:
    out = torch.empty((4, 3), dtype=dtype)
    poison(out)
    assert bool(poisoned(out).all()) and bool(torch.isnan(out.float()).all())
    out[1, 2] = 1.0
    assert int(poisoned(out).sum()) == 11
    if out.element_size() > 1:  # e4m3 has one NaN only
        out[0, 0] = torch.tensor(float("inf")) - torch.tensor(float("inf"))
        assert not bool(poisoned(out)[0, 0])


def test_bits_tell_zeros_and_nans_apart() -> None:
    assert not torch.equal(bits(torch.tensor([0.0])), bits(torch.tensor([-0.0])))
    nan = torch.tensor([float("nan")])
    assert torch.equal(bits(nan), bits(nan.clone()))


def test_a_route_may_declare_coarser_arithmetic(make_trial: Any) -> None:
    class Coarse(Planted):
        arithmetic = Arithmetic(logits="bf16")

    plain, coarse = (
        Stage("reference", make_trial(route), Placement.TAIL, Tally())
        for route in (Planted("planted-clean"), Coarse("planted-clean"))
    )
    assert coarse.bound > plain.bound


def test_a_route_may_declare_its_arithmetic_by_column(make_trial: Any) -> None:
    class Quantising(Planted):
        def arithmetic(self, column: Column, facts: Facts) -> Arithmetic:
            return Arithmetic(query="e4m3", weights="e4m3") if column.q_len == 1 else Arithmetic()

    route = Quantising("planted-clean")
    shape = Shape(8, 1, 128, 16)
    bounds = [
        Stage(
            "reference",
            make_trial(route, Column(shape, PROFILES["fp8"], q_len, 1, 4096)),
            Placement.TAIL,
            Tally(),
        ).bound
        for q_len in (1, 4)
    ]
    # measured on XQA: up to 0.08 where its fp8 kernel runs, 0.006 elsewhere
    assert 0.08 < bounds[0] < 0.3
    assert 0.006 < bounds[1] < 0.02


@pytest.mark.parametrize(
    ("text", "sticky"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("Error in function run: misaligned address (716)", True),
        ("cuMemUnmap failed: CUDA_ERROR_LAUNCH_FAILED", True),
        ("Unsupported page size 24", False),
    ],
)
def test_a_device_error_is_known_by_what_libraries_quote(text: str, sticky: bool) -> None:
    assert is_device_error(RuntimeError(text)) is sticky


@pytest.mark.parametrize(
    ("text", "unfit"),
    [
        # FlashInfer's exception for a module that was not prebuilt: once stored as the kernel's launch_error
        ("JIT compilation is disabled via FLASHINFER_DISABLE_JIT environment variable", True),
        ("MissingJITCacheError: xqa_input_bf16", True),
        ("tile must be a multiple of 16", False),
    ],
)
def test_a_module_that_was_not_built_accuses_nobody(text: str, unfit: bool) -> None:
    assert is_unfit(RuntimeError(text)) is unfit
