"""Real routes with a mistake: by name, one change each, seen by a check and refused by the contract."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.arena.base import Arena, Placement
from autotune.arena.factory import open_arena
from autotune.arena.operands import Operands, QueryStride, Recipe, build, capacity_of
from autotune.arena.plain import PlainArena
from autotune.checks import registry
from autotune.checks.base import Trial
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind
from autotune.routes import planted_xqa
from autotune.routes.base import Capture, Route
from autotune.routes.flashinfer import session
from autotune.routes.planted_live import MISTAKES, Mistaken, NarrowTable, PlantedLive, name_of
from autotune.worker.jobs import child_route

FACTS = Facts("cpu", {}, {})
H200 = Facts("cuda", {"compute_capability": "9.0"}, {"flashinfer": "0.7.2"})
# Four rows: the page table ends flush with unmapped memory.
COLUMN = Column(Shape(4, 2, 64, 16), PROFILES["bf16"], q_len=3, batch_size=4, max_context=512)
KV_LENS = (64, 300)

torch.set_num_threads(1)


def checked(mistake: str, check: str, route: str = "torch-splitkv") -> CheckResult:
    """What a check says of a mistake, in this process and in guarded memory."""

    def guarded(placement: Placement) -> Arena:
        return open_arena("host_mmap", "cpu", placement)

    trial = Trial(
        route=PlantedLive(name_of(mistake, route)),
        column=COLUMN,
        facts=FACTS,
        kv_lens=KV_LENS,
        seed=1,
        device="cpu",
        make_arena=guarded,
        launched=lambda text: None,
    )
    return registry.get(check).run(trial)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_route_that_travels_by_name(mistake: str) -> None:
    name = name_of(mistake, "xqa-decode")
    route = PlantedLive(name)
    assert isinstance(route, Route) and route.name == name == f"planted-live-{mistake}-in-xqa-decode"
    assert pickle.loads(pickle.dumps(route)) == route
    assert route.capture is Capture.NO
    assert (route.family, route.needs) == (route.base.family, route.base.needs)
    assert route.mistake.made.endswith(".") and "\n" not in route.mistake.made
    assert route.supports(planted_xqa.COLUMN, H200) is None
    assert route.arithmetic(planted_xqa.COLUMN, H200).query is None


@pytest.mark.parametrize(
    "name",
    ["planted-nothing", "planted-live-narrow-table", "planted-live-nothing-in-fa2", "narrow-table-in-fa2"],
)
def test_an_unknown_mistake_is_one_clear_line(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"no planted route is called '{name}'; there are planted-live-"
    ) as e:
        PlantedLive(name)
    assert "\n" not in str(e.value) and "narrow-table" in str(e.value)


def test_an_unknown_route_is_told_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="unknown route 'fa4': there are fa2,"):
        PlantedLive("planted-live-narrow-table-in-fa4")


def test_what_only_some_kernels_can_be_given() -> None:
    for mistake in ("dirty-semaphores", "strided-query"):
        route = PlantedLive(name_of(mistake, "fa2"))
        assert "is made in xqa-decode" in str(route.supports(planted_xqa.COLUMN, H200))
    # what the route itself does not take, it does not take with a mistake either
    assert "needs a CUDA device" in str(PlantedLive(name_of("old-lengths", "fa2")).supports(COLUMN, FACTS))


@pytest.mark.parametrize("route", ["torch-splitkv", "torch-sdpa"])
@pytest.mark.parametrize(
    ("mistake", "check", "kind"),
    [
        ("old-lengths", "reference", FailureKind.WRONG_OUTPUT),
        ("empty-row", "reference", FailureKind.WRONG_OUTPUT),
        # torch looks at every index and shape: what a GPU kernel follows, it refuses
        ("narrow-table", "ragged_lengths", FailureKind.LAUNCH_ERROR),
        ("page-past-the-pool", "reference", FailureKind.LAUNCH_ERROR),
        ("page-farthest", "reference", FailureKind.LAUNCH_ERROR),
        ("page-minus-1", "reference", FailureKind.LAUNCH_ERROR),
        ("page-minus-100000", "reference", FailureKind.LAUNCH_ERROR),
        ("small-output", "reference", FailureKind.LAUNCH_ERROR),
    ],
)
def test_a_check_sees_it_in_a_real_kernel(route: str, mistake: str, check: str, kind: FailureKind) -> None:
    row = checked(mistake, check, route)
    assert (row.status, row.kind) == (CheckStatus.FAILED, kind), row.detail


def made(mistake: str, recipe: Recipe, arena: PlainArena) -> tuple[Operands, Any]:
    """Operands of ``recipe`` and the step that the mistake makes of theirs."""
    operands = build(arena, COLUMN, recipe, "cpu")
    capacity = capacity_of(COLUMN, recipe, "cpu")
    return operands, MISTAKES[mistake].step(operands.step, capacity, arena.tensor)


def test_each_changes_what_it_says_and_nothing_of_the_checks_own() -> None:
    recipe = Recipe((64, 17, 3, 129), seed=3)
    with PlainArena() as arena:
        operands, step = made("narrow-table", recipe, arena)
        before, lens = operands.step.page_table.clone(), operands.step.seq_lens.clone()
        assert step.page_table.shape == (4, 8) and step.page_table.is_contiguous()
        assert torch.equal(step.page_table, before[:, :8])
        assert made("old-lengths", recipe, arena)[1].seq_lens.tolist() == [61, 14, 1, 126]
        _, empty = made("empty-row", recipe, arena)
        assert empty.seq_lens.tolist() == [64, 17, 3, 0] and empty.host_kv_lens == (64, 17, 3, 0)
        total = capacity_of(COLUMN, recipe, "cpu").num_pages
        for mistake, page in (
            ("page-past-the-pool", total + 63),
            ("page-farthest", 2**31 - 1),
            ("page-minus-1", -1),
            ("page-minus-100000", -100_000),
        ):
            _, other = made(mistake, recipe, arena)
            changed = (other.page_table != operands.step.page_table).nonzero().tolist()
            assert changed == [[3, 0]] and int(other.page_table[3, 0]) == page
        small = MISTAKES["small-output"].out(operands.out, arena.tensor)
        assert small.shape == (10, 4, 64) and small.dtype == operands.out.dtype
        assert torch.equal(operands.step.page_table, before) and torch.equal(operands.step.seq_lens, lens)


@pytest.fixture(name="library")
def _library(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands where FlashInfer's functions stand; the keywords of every call, and the rows of its output."""
    calls: list[dict[str, Any]] = []

    def function(**keywords: Any) -> None:
        calls.append(keywords)

    monkeypatch.setattr(session, "resolve", lambda target: function)
    return calls


def launched(route: Route, recipe: Recipe, arena: PlainArena) -> Operands:
    """One launch of ``route`` on the CPU, where the library only records."""
    column = planted_xqa.COLUMN
    operands = build(arena, column, recipe, "cpu")
    operands.step.host_kv_lens = None
    opened = route.open(capacity_of(column, recipe, "cpu"), arena.tensor)
    opened.prepare(operands.step)
    opened.run(operands.out)
    opened.close()
    return operands


PACKED = Recipe((64, 70, 129, 257), seed=1, query_stride=QueryStride.PACKED_QKV)


@pytest.mark.parametrize(("route", "key"), [("xqa-decode", "query"), ("fmha-v2", "qkv")])
def test_a_strided_query_reaches_the_kernel(library: list[dict[str, Any]], route: str, key: str) -> None:
    with PlainArena() as arena:
        operands = launched(PlantedLive(name_of("strided-query", route)), PACKED, arena)
        launched(PlantedLive(name_of("narrow-table", route)), PACKED, arena)
        mistaken, copied = (call[key][0] if key == "qkv" else call[key] for call in library)
        assert mistaken.stride() == (10 * 128, 128, 1) and mistaken.data_ptr() == operands.step.q.data_ptr()
        assert copied.is_contiguous()


def test_the_semaphores_are_dirty_and_nothing_else_is(library: list[dict[str, Any]]) -> None:
    with PlainArena() as arena:
        launched(PlantedLive(name_of("dirty-semaphores", "xqa-decode")), PACKED, arena)
        launched(PlantedLive(name_of("old-lengths", "xqa-decode")), PACKED, arena)
        counters = [call["workspace_buffer"][: 8 * 2**20].view(torch.int32) for call in library]
        assert bool((counters[0] == 1).all()) and not bool(counters[1].any())
        assert library[1]["seq_lens"].tolist() == [60, 66, 125, 253]


def test_the_output_is_two_rows_short(library: list[dict[str, Any]]) -> None:
    with PlainArena() as arena:
        launched(PlantedLive(name_of("small-output", "xqa-decode")), PACKED, arena)
        assert library[0]["out"].shape == (14, 8, 128)


def test_the_controls_narrow_table_is_this_one(library: list[dict[str, Any]]) -> None:
    with PlainArena() as arena:
        launched(planted_xqa.PlantedXqa("planted-xqa-narrow-table"), PACKED, arena)
        launched(planted_xqa.PlantedXqa("planted-xqa-clean"), PACKED, arena)
        assert [call["block_tables"].shape[1] for call in library] == [4, 8]
        route: Callable[..., Any] = planted_xqa.PlantedXqa("planted-xqa-narrow-table").open
        opened = route(capacity_of(planted_xqa.COLUMN, PACKED, "cpu"), arena.tensor)
        assert isinstance(opened, Mistaken) and isinstance(opened._mistake, NarrowTable)


def test_a_worker_finds_it_by_name() -> None:
    found = child_route(name_of("old-lengths", "torch-splitkv"))
    assert isinstance(found, PlantedLive)
    with pytest.raises(ValueError, match="planted-live-nothing-in-torch-splitkv"):
        child_route(name_of("nothing", "torch-splitkv"))
