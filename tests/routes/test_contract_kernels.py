"""The rules that a kernel, a machine or a caller's own buffers bring in: each is broken alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from autotune.arena.operands import Recipe, build, capacity_of
from autotune.arena.plain import PlainArena
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES, DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.routes import registry
from autotune.routes.base import Capacity, Step
from autotune.routes.contract import (
    KERNELS,
    RULES,
    Buffers,
    Context,
    ContractError,
    Graph,
    Kernel,
    Level,
    Plan,
    Proven,
    check_step,
    kernel_of,
)
from autotune.routes.flashinfer.masks import fill_causal_mask
from autotune.routes.foreign import examine

COLUMN = Column(Shape(8, 2, 64, 16), PROFILES["bf16"], 4, 3, 256)
LENS = (100, 4, 256)
FACTS = Facts("cpu", {"name": "a", "cores": 2, "threads": 1, "isa": "x"}, {"torch": "2", "torch_commit": "c"})
ELSEWHERE = dataclasses.replace(FACTS, hardware={**FACTS.hardware, "cores": 4})
MIB = 2**20


@dataclass
class Case:
    """A right call of one kernel; ``options`` go to the check as they are."""

    capacity: Capacity
    step: Step
    out: torch.Tensor
    route: Any
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, level: Level = Level.FULL) -> None:
        check_step(self.capacity, self.step, level=level, out=self.out, route=self.route, **self.options)

    def say(self, **values: Any) -> None:
        """Say more in the context."""
        self.options["context"] = dataclasses.replace(self.options.get("context", Context()), **values)


def made(route: Any = "xqa-decode", column: Column = COLUMN, lens: tuple[int, ...] = LENS) -> Case:
    with PlainArena() as arena:
        operands = build(arena, column, Recipe(lens, 1, table_garbage=-1), "cpu")
    return Case(capacity_of(column, operands.recipe, "cpu"), operands.step, operands.out, route)


def plan_of(column: Column, **other: Any) -> Plan:
    shape, dtypes = column.shape, column.dtypes
    return dataclasses.replace(
        Plan(
            column.q_len,
            shape.window_left,
            shape.soft_cap,
            shape.sinks,
            shape.mask,
            dtypes.q,
            dtypes.kv,
            dtypes.out,
        ),
        **other,
    )


@pytest.fixture(scope="module")
def scratch() -> Iterator[torch.Tensor]:
    yield torch.zeros(129 * MIB, dtype=torch.uint8)


def buffers(scratch: torch.Tensor, **other: Any) -> Buffers:
    """What XQA is handed, all of it right."""
    mask = torch.zeros((3, 4, 2), dtype=torch.uint16)
    fill_causal_mask(mask)
    return dataclasses.replace(Buffers(workspace=scratch[: 128 * MIB], mask=mask), **other)


# --- each change leaves one rule broken


def ragged(case: Case, scratch: torch.Tensor) -> None:
    case.options["q_lens"] = (4, 3, 4)


def too_many_queries(case: Case, scratch: torch.Tensor) -> None:
    case.route = "trtllm-gen-decode-ragged"
    case.options["q_lens"] = (4, 5, 3)


def without_the_new_tokens(case: Case, scratch: torch.Tensor) -> None:
    case.options["cached_lens"] = (100, 0, 252)


def short_of_one(case: Case, scratch: torch.Tensor) -> None:
    case.options["cached_lens"] = (96, 0)


def masked(case: Case, scratch: torch.Tensor) -> None:
    case.route = "fa2-decode"
    case.step.host_kv_lens = (100, 1, 256)
    case.step.seq_lens[1] = 1
    case.options["pad_value"] = 1


def wider_table(case: Case, scratch: torch.Tensor) -> None:
    case.step.page_table = torch.cat([case.step.page_table, case.step.page_table[:, :1]], dim=1)


class _Tiled:
    """A route of another package, whose kernel reads page-table rows in tiles of 96 tokens."""

    name = "tiled"
    kernel = Kernel("tiled", table_multiple=96)


def odd_width(case: Case, scratch: torch.Tensor) -> None:
    case.route = _Tiled()


def packed(case: Case, scratch: torch.Tensor) -> None:
    rows, heads, dim = case.step.q.shape
    case.step.q = torch.zeros((rows, heads + 4, dim), dtype=torch.bfloat16)[:, :heads]


def degenerate(case: Case, scratch: torch.Tensor) -> None:
    """One request with q_len 1: contiguous, says torch, whatever its row stride."""
    fresh = made(column=Column(COLUMN.shape, COLUMN.dtypes, 1, 1, 256), lens=(100,))
    case.capacity, case.step, case.out = fresh.capacity, fresh.step, fresh.out
    case.step.q = case.step.q.as_strided((1, 8, 64), (4608, 64, 1))
    assert case.step.q.is_contiguous()


def odd_address(case: Case, scratch: torch.Tensor) -> None:
    case.step.q = torch.zeros(case.step.q.numel() + 1, dtype=torch.bfloat16)[1:].view(case.step.q.shape)


def odd_fp8_pages(case: Case, scratch: torch.Tensor) -> None:
    """Pages of 2056 bytes: fp8 pages padded by 8."""
    case.capacity = dataclasses.replace(
        case.capacity, column=dataclasses.replace(COLUMN, dtypes=PROFILES["fp8"])
    )
    pages = case.capacity.num_pages
    pool = torch.zeros((2, pages, 2056), dtype=torch.float8_e4m3fn)[..., :2048]
    case.step.k, case.step.v = (half.unflatten(-1, (16, 2, 64)) for half in pool)


def whole_number_scale(case: Case, scratch: torch.Tensor) -> None:
    case.step.k_scale = 1


def scale_on_the_device(case: Case, scratch: torch.Tensor) -> None:
    case.step.v_scale = torch.ones(())  # type: ignore[assignment]


def query_scale(case: Case, scratch: torch.Tensor) -> None:
    case.say(q_scale=0.5)


def dropped_sinks(case: Case, scratch: torch.Tensor) -> None:
    column = dataclasses.replace(COLUMN, shape=dataclasses.replace(COLUMN.shape, sinks=True))
    case.capacity = dataclasses.replace(case.capacity, column=column)
    case.step.sinks = torch.zeros(8)
    case.route = "fa2"


def sinks_in_bf16(case: Case, scratch: torch.Tensor) -> None:
    dropped_sinks(case, scratch)
    case.step.sinks = torch.zeros(8, dtype=torch.bfloat16)
    case.route = "xqa-decode"


def dropped_cap(case: Case, scratch: torch.Tensor) -> None:
    column = dataclasses.replace(COLUMN, shape=dataclasses.replace(COLUMN.shape, soft_cap=30.0))
    case.capacity = dataclasses.replace(case.capacity, column=column)


def planned_without_window(case: Case, scratch: torch.Tensor) -> None:
    column = dataclasses.replace(COLUMN, shape=dataclasses.replace(COLUMN.shape, window_left=127))
    case.capacity = dataclasses.replace(case.capacity, column=column)
    case.say(plan=plan_of(column, window_left=-1))


def planned_for_another_dtype(case: Case, scratch: torch.Tensor) -> None:
    case.say(plan=plan_of(COLUMN, kv="e4m3"))


def no_mask(case: Case, scratch: torch.Tensor) -> None:
    case.say(buffers=buffers(scratch, mask=None))


def tree_mask(case: Case, scratch: torch.Tensor) -> None:
    case.say(buffers=buffers(scratch, mask_kind="tree"))


def mask_for_another_q_len(case: Case, scratch: torch.Tensor) -> None:
    case.say(buffers=buffers(scratch, mask=torch.zeros((3, 8, 2), dtype=torch.uint16)))


def full_mask(case: Case, scratch: torch.Tensor) -> None:
    mask = torch.full((3, 4, 2), 15, dtype=torch.int16)
    mask[:, :, 1] = 0
    case.say(buffers=buffers(scratch, mask=mask.view(torch.uint16)))


def small_workspace(case: Case, scratch: torch.Tensor) -> None:
    case.say(buffers=buffers(scratch, workspace=scratch[: 64 * MIB]))


def no_workspace(case: Case, scratch: torch.Tensor) -> None:
    case.say(buffers=buffers(scratch, workspace=None))


def shared_workspace(case: Case, scratch: torch.Tensor) -> None:
    case.say(buffers=buffers(scratch, others=(("fa2's workspace", scratch[127 * MIB :]),)))


def dirty_semaphores(case: Case, scratch: torch.Tensor) -> None:
    dirty = torch.zeros(128 * MIB, dtype=torch.uint8)
    dirty[8 * MIB - 1] = 3
    case.say(buffers=buffers(scratch, workspace=dirty))


def dirty_counters(case: Case, scratch: torch.Tensor) -> None:
    case.say(buffers=buffers(scratch, counters=torch.tensor([0, 0, 7], dtype=torch.uint8)))


def other_batch(case: Case, scratch: torch.Tensor) -> None:
    case.say(graph=dataclasses.replace(Graph.of(case.step, case.out), batch_size=8))


def rebound_lengths(case: Case, scratch: torch.Tensor) -> None:
    case.say(graph=Graph.of(case.step, case.out))
    case.step.seq_lens = case.step.seq_lens.clone()


def no_new_plan(case: Case, scratch: torch.Tensor) -> None:
    case.route = "fa2"
    case.say(graph=Graph.of(case.step, case.out))


def another_plan(case: Case, scratch: torch.Tensor) -> None:
    case.route = "fa2"
    case.say(graph=dataclasses.replace(Graph.of(case.step, case.out, plan=(1, 7)), replanned=(1, 9)))


def another_device(case: Case, scratch: torch.Tensor) -> None:
    case.capacity = dataclasses.replace(case.capacity, device="cuda:1")
    for name in ("q", "k", "v", "page_table", "seq_lens"):
        setattr(case.step, name, _OnDevice(getattr(case.step, name)))
    case.out = _OnDevice(case.out)  # type: ignore[assignment]
    case.say(current_device=0)


class _OnDevice:
    """A tensor that says it is on ``cuda:1``; there is no GPU here, and ``static`` asks for no more."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.device = torch.device("cuda", 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def not_supported(case: Case, scratch: torch.Tensor) -> None:
    case.route = registry.get("torch-sdpa")
    column = dataclasses.replace(COLUMN, dtypes=DTypes("fp16", "fp16", "fp16"))
    fresh = made(case.route, column)
    case.capacity, case.step, case.out = fresh.capacity, fresh.step, fresh.out
    case.say(facts=FACTS)


def elsewhere(case: Case, scratch: torch.Tensor) -> None:
    case.say(facts=ELSEWHERE, table_facts=FACTS)


def nowhere(case: Case, scratch: torch.Tensor) -> None:
    case.say(table_facts=FACTS)


def ranks_apart(case: Case, scratch: torch.Tensor) -> None:
    case.say(digests=("sha256:aa", "sha256:aa", "sha256:bb"))


def unproven_batch(case: Case, scratch: torch.Tensor) -> None:
    case.say(proven=Proven((1, 2, 4), 256, ((4, 8),)))


def unproven_length(case: Case, scratch: torch.Tensor) -> None:
    case.say(proven=Proven((3,), 128))


# rule, what is done to a right call of XQA, what the message says, whether host values alone show it
BROKEN: list[tuple[str, Callable[[Case, torch.Tensor], None], str, bool]] = [
    ("uniform_q_len", ragged, r"q_lens\[1\] is 3; xqa-decode takes one q_len for all, 4", True),
    ("uniform_q_len", too_many_queries, "q_lens from 3 to 5, 12 in all", True),
    ("new_tokens", without_the_new_tokens, r"seq_lens\[0\] is 100; the request held 100 .* 104 in all", True),
    ("new_tokens", short_of_one, "cached_lens has 2 lengths for 3 requests", True),
    ("masked_rows", masked, r"seq_lens\[1\] is 1, a padded row .* fa2-decode takes no such row", True),
    (
        "split_width",
        wider_table,
        "17 pages wide; xqa-decode splits the KV by this width, and proven is 16",
        True,
    ),
    ("table_multiple", odd_width, "16 pages of 16 tokens wide; tiled needs a multiple of 96", True),
    ("dense_query", packed, r"q has strides \(768, 64, 1\); xqa-decode gets no query stride", True),
    ("dense_query", degenerate, r"q has strides \(4608, 64, 1\)", True),
    ("alignment", odd_address, "q begins at 0x.*2; xqa-decode needs a multiple of 16", True),
    ("alignment", odd_fp8_pages, "k has a stride of 2056 bytes; xqa-decode needs multiples of 16", True),
    ("host_scales", whole_number_scale, r"k_scale is 1 \(int\); xqa-decode takes Python floats", True),
    ("host_scales", scale_on_the_device, r"v_scale is \(Tensor\)", True),
    ("q_scale", query_scale, "q_scale is 0.5; xqa-decode gets a bf16 query here", True),
    ("sinks", dropped_sinks, "sinks are given; fa2 drops them", True),
    ("sinks", sinks_in_bf16, r"sinks are \(8,\) torch.bfloat16; \(8,\) fp32 is needed", True),
    ("soft_cap", dropped_cap, "soft_cap is 30.0; xqa-decode has none", True),
    ("plan", planned_without_window, "window_left is 127 at run and was -1 at plan", True),
    ("plan", planned_for_another_dtype, "kv is bf16 at run and was e4m3 at plan", True),
    ("draft_mask", no_mask, "no mask is given; xqa-decode needs one for q_len 4", True),
    ("draft_mask", tree_mask, "the mask is of kind tree; proven is causal", True),
    ("draft_mask", mask_for_another_q_len, r"the mask is \(3, 8, 2\)", True),
    ("draft_mask", full_mask, r"mask\[0, 0, 0\] is 0x000f; a causal mask has 0x0001 there", False),
    ("workspace", small_workspace, "the workspace has 67108864 bytes; xqa-decode needs 134217728", True),
    ("workspace", no_workspace, "no workspace is given", True),
    ("private_workspace", shared_workspace, "shares 1048576 bytes with fa2's workspace", True),
    ("semaphores", dirty_semaphores, "byte 8388607 of the workspace is 3", False),
    ("semaphores", dirty_counters, "byte 2 of the counters is 7", False),
    ("graph", other_batch, "3 requests; the graph was captured for 8", True),
    ("graph", rebound_lengths, "seq_lens is at 0x.*; the graph reads it at 0x", True),
    ("graph", no_new_plan, "nothing was planned for this replay; fa2 plans", True),
    ("graph", another_plan, r"the plan is \(1, 9\); the graph was captured with \(1, 7\)", True),
    ("supported", not_supported, "torch-sdpa does not take .*: takes fp32 or bf16", True),
    ("fingerprint", elsewhere, "hardware.cores: table 2, here 4", True),
    ("fingerprint", nowhere, "the facts of this machine are None", True),
    ("ranks", ranks_apart, "rank 2 holds the table sha256:bb, rank 0 sha256:aa", True),
    ("proven_box", unproven_batch, r"batch_size is 3; proven are \(1, 2, 4\)", True),
    ("proven_box", unproven_length, "may have 256 tokens; proven are 128", True),
]
STATIC_ONLY = [
    ("current_device", another_device, "q is on device 1; the current device, .* is 0"),
]


@pytest.mark.parametrize(("rule", "change", "message", "static"), BROKEN)
def test_a_broken_rule_is_named(
    rule: str,
    change: Callable[[Case, torch.Tensor], None],
    message: str,
    static: bool,
    scratch: torch.Tensor,
) -> None:
    case = made()
    case.say(buffers=buffers(scratch), plan=plan_of(COLUMN), proven=Proven((3,), 256))
    case.options["cached_lens"] = (96, 0, 252)
    case.options["q_lens"] = (4, 4, 4)
    case.check()
    case.options.clear()
    change(case, scratch)
    with pytest.raises(ContractError, match=f"contract rule {rule}: .*{message}") as caught:
        case.check(Level.FULL)
    assert caught.value.rule == rule and "\n" not in str(caught.value)
    if static:
        with pytest.raises(ContractError, match=f"contract rule {rule}: .*{message}"):
            case.check(Level.STATIC)
    else:
        case.check(Level.STATIC)


@pytest.mark.parametrize(("rule", "change", "message"), STATIC_ONLY)
def test_a_broken_rule_of_the_host(
    rule: str, change: Callable[[Case, torch.Tensor], None], message: str, scratch: torch.Tensor
) -> None:
    case = made()
    change(case, scratch)
    with pytest.raises(ContractError, match=f"contract rule {rule}: .*{message}"):
        case.check(Level.STATIC)
    case.say(current_device=1)
    case.check(Level.STATIC)


def test_every_rule_is_broken_by_some_test() -> None:
    from tests.routes.test_contract import GENERAL

    told = {rule for rule, *_ in BROKEN} | {rule for rule, *_ in STATIC_ONLY}
    assert told | GENERAL == {rule.name for rule in RULES}


def test_what_was_proven_is_taken(scratch: torch.Tensor) -> None:
    case = made()
    case.say(proven=Proven((1, 2, 4), 256, ((2, 4),)), digests=("sha256:aa",) * 8)
    case.say(facts=FACTS, table_facts=FACTS, q_scale=1.0)
    case.say(graph=Graph.of(case.step, case.out, plan=(1, 7)))
    case.check()
    # padded rows have their own length, whatever they held
    case.step.host_kv_lens = (100, 1, 256)
    case.step.seq_lens[1] = 1
    case.options |= {"pad_value": 1, "cached_lens": (96, 0, 252)}
    case.check()


def test_a_ragged_kernel_takes_requests_of_other_lengths() -> None:
    case = made("trtllm-gen-decode-ragged")
    case.step.q = case.step.q[:12]
    case.options["q_lens"] = (4, 4, 4)
    case.check()


def test_a_quantised_query_has_a_scale() -> None:
    case = made("fa3", dataclasses.replace(COLUMN, dtypes=PROFILES["fp8"]))
    case.say(q_scale=0.5)
    case.check()
    case.route = "xqa-decode"  # keeps the query in 16 bit
    with pytest.raises(ContractError, match="rule q_scale"):
        case.check()


def test_the_cpu_has_no_grid() -> None:
    assert kernel_of("torch-sdpa").grid_limit is None and kernel_of(None).grid_limit == 65535


def test_every_route_of_ours_has_its_kernel_and_no_other_is_named() -> None:
    assert set(KERNELS) == set(registry.BUILT_IN)
    assert all(kernel.name == name for name, kernel in KERNELS.items())


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_kernels_agree_with_their_routes(name: str) -> None:
    """What the table of kernels repeats is what the adapters say."""
    from autotune.routes.base import Capture, Need
    from autotune.routes.flashinfer.xqa import SEMAPHORE_BYTES

    route, kernel = registry.get(name), KERNELS[name]
    assert kernel.replan == (route.capture is Capture.REPLAN)
    assert kernel.uniform_q_len == (Need.UNIFORM_Q_LEN in route.needs) or name.startswith("torch-")
    if name == "xqa-decode":
        assert kernel.semaphore_bytes == SEMAPHORE_BYTES


def test_an_unknown_route_is_held_to_what_every_kernel_asks() -> None:
    assert kernel_of("somebody's") == kernel_of(None)


def test_another_packages_route_brings_its_kernel() -> None:
    class Made(type(registry.get("torch-sdpa"))):  # type: ignore[misc]
        name = "tiled"
        kernel = Kernel("tiled", table_multiple=96)

    assert kernel_of(examine(Made(), "tiled")).table_multiple == 96
    assert kernel_of(registry.get("torch-sdpa")) is KERNELS["torch-sdpa"]
