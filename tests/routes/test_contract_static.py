"""``Contract``, what a serving process asks before a call: it reads no tensor and hides no broken rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.domain.dtypes import PROFILES
from autotune.routes.contract import KERNELS, Context, Contract, Graph, Level, Proven, check_step
from tests.routes import test_contract as general
from tests.routes import test_contract_kernels as kernels


class NoWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Any operation on a tensor is an error; an attribute is not one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def no_work() -> TorchDispatchMode:
    return NoWork()  # type: ignore[no-untyped-call]


def without_contents(case: kernels.Case) -> None:
    """Operands that have every attribute and no element."""
    for name in ("q", "k", "v", "page_table", "seq_lens"):
        setattr(case.step, name, getattr(case.step, name).to("meta"))
    case.out = case.out.to("meta")
    case.capacity = dataclasses.replace(case.capacity, device="meta")


def test_work_and_reads_would_be_seen() -> None:
    lens = torch.ones(3, dtype=torch.int32)
    with no_work(), pytest.raises(AssertionError):
        lens.max()
    with pytest.raises((RuntimeError, NotImplementedError)):
        lens.to("meta").tolist()


@pytest.mark.parametrize("route", [None, "xqa-decode", "fa2", "trtllm-gen-decode"])
def test_nothing_is_computed_and_nothing_read(route: str | None) -> None:
    case = kernels.made(route)
    case.step.host_kv_lens = None
    without_contents(case)
    scale = torch.ones((), device="meta")
    contract = Contract(case.capacity, route=route)
    with no_work():
        assert contract.broken(case.step, case.out) is None  # every rule
        assert contract.broken(case.step, case.out) is None  # the quick way
        case.step.q_len = 5
        assert contract.broken(case.step, case.out) is not None
        case.step.q_len = 4
        case.step.v_scale = scale  # type: ignore[assignment]
        contract.broken(case.step, case.out)


def refused_both_ways(case: Any, change: Callable[[], None], route: Any, **options: Any) -> None:
    """A contract that knows the right call must not let the wrong one through for that."""
    contract = Contract(case.capacity, route=route, **options)
    for _ in range(2):
        assert contract.broken(case.step, case.out) is None
    change()
    want = Contract(case.capacity, route=route, **options).broken(case.step, case.out)
    found = contract.broken(case.step, case.out)
    assert want is not None and str(found) == str(want)
    with pytest.raises(type(want), match=want.rule):
        contract.check(case.step, case.out)


# what changes a step; the other changes are of what a contract is bound to
STEPS = [
    (rule, change)
    for rule, change, _, static in general.BROKEN
    if static
    and change.__name__ not in ("far", "many_requests", "two_packed_pools")
    and "opened_for" not in change.__qualname__
    and "set_column" not in change.__qualname__
]


@pytest.mark.parametrize(("rule", "change"), STEPS)
def test_a_known_call_hides_no_other(rule: str, change: Callable[[Any], None]) -> None:
    case = general.made()
    refused_both_ways(case, lambda: change(case), None)


@pytest.mark.parametrize(
    "change",
    [
        kernels.wider_table,
        kernels.packed,
        kernels.odd_address,
        kernels.whole_number_scale,
        kernels.scale_on_the_device,
    ],
)
def test_nor_does_a_known_call_of_a_kernel(change: Callable[[Any, Any], None]) -> None:
    case = kernels.made()
    refused_both_ways(case, lambda: change(case, None), "xqa-decode")


def test_lengths_on_the_host_are_looked_at_in_every_step() -> None:
    case = kernels.made()
    contract = Contract(case.capacity, pad_value=1, context=Context(proven=Proven((3,), 200)))
    case.step.host_kv_lens = (100, 4, 200)
    assert contract.broken(case.step) is None
    for lens, rule in (
        ((100, 4, 201), "proven_box"),
        ((100, 3, 200), "lengths"),
        ((100, 0, 200), "empty_rows"),
        ((100, 4), "seq_lens"),
    ):
        case.step.host_kv_lens = lens
        assert (error := contract.broken(case.step)) is not None and error.rule == rule
    case.step.host_kv_lens = (100, 1, 200)  # the pad value: legal, and left to the rules each time
    assert contract.broken(case.step) is None
    case.step.host_kv_lens = (101, 5, 199)
    assert contract.broken(case.step) is None
    lens_in_a_list: Any = [100, 4, 200]
    case.step.host_kv_lens = lens_in_a_list
    assert contract.broken(case.step) is None
    lens_in_a_list[2] = 256
    assert (error := contract.broken(case.step)) is not None and error.rule == "proven_box"


@pytest.mark.parametrize("known", [(100, 4, 200), None])
def test_lengths_that_are_not_said_may_be_any(known: tuple[int, ...] | None) -> None:
    """What lengths on the host fit into may be too small for those on the device."""
    for narrow, context in ((True, Context()), (False, Context(proven=Proven((3,), 200)))):
        case = kernels.made()
        if narrow:
            case.step.page_table = case.step.page_table[:, :-1].contiguous()
        contract = Contract(case.capacity, context=context)
        case.step.host_kv_lens = known
        contract.broken(case.step)
        case.step.host_kv_lens = None
        error = contract.broken(case.step)
        assert error is not None and error.rule == ("table_width" if narrow else "proven_box")


def test_a_query_scale_on_the_device_is_not_looked_at() -> None:
    case = kernels.made()
    scale: Any = torch.ones(())
    contract = Contract(case.capacity, context=Context(q_scale=scale))
    with no_work():
        error = contract.broken(case.step)
    assert error is not None and str(error) == (
        "contract rule q_scale: q_scale is a Tensor; a Python number is needed"
    )


def test_a_known_call_with_an_output_says_nothing_of_one_without() -> None:
    case = kernels.made()
    contract = Contract(case.capacity, route="xqa-decode")
    assert contract.broken(case.step, case.out) is None
    assert contract.broken(case.step) is None
    assert contract.broken(case.step, case.out[:-1]) is not None
    narrow = torch.zeros((*case.out.shape[:2], 2 * case.out.shape[2]), dtype=case.out.dtype)
    assert contract.broken(case.step, narrow[..., ::2]) is not None


def test_sinks_of_another_layer_are_looked_at() -> None:
    case = kernels.made("xqa-decode")
    column = dataclasses.replace(
        case.capacity.column, shape=dataclasses.replace(case.capacity.column.shape, sinks=True)
    )
    contract = Contract(dataclasses.replace(case.capacity, column=column), route="xqa-decode")
    case.step.sinks = torch.zeros(8)
    assert contract.broken(case.step) is None
    case.step.sinks = torch.ones(8)
    assert contract.broken(case.step) is None
    for wrong in (None, torch.zeros(4), torch.zeros(8, dtype=torch.float64)):
        case.step.sinks = wrong
        assert (error := contract.broken(case.step)) is not None and error.rule == "sinks"
    case.step.sinks = torch.zeros(8, device="meta")
    assert (error := contract.broken(case.step)) is not None and error.rule == "device"


def test_block_scales_belong_to_the_pool() -> None:
    shape = dataclasses.replace(kernels.COLUMN.shape, kv_layout="fused-hnd")
    column = dataclasses.replace(kernels.COLUMN, shape=shape, dtypes=PROFILES["nvfp4"])
    case = kernels.made("trtllm-gen-decode", column)
    contract = Contract(case.capacity, route="trtllm-gen-decode")
    assert contract.broken(case.step) is None
    assert case.step.kv_block_scales is not None
    k, v = case.step.kv_block_scales
    case.step.kv_block_scales = (k.clone(), v.clone())  # the next layer's
    assert contract.broken(case.step) is None
    for wrong in (None, (k, v[:-1]), (k[..., :2], v), (k, v.view(torch.uint8)), (k, v.to("meta"))):
        case.step.kv_block_scales = wrong
        for asked in (contract, Contract(case.capacity, route="trtllm-gen-decode")):
            assert (error := asked.broken(case.step)) is not None and error.rule == "block_scales"


def test_new_tokens_and_graphs_never_take_the_quick_way() -> None:
    case = kernels.made()
    contract = Contract(case.capacity)
    assert contract.broken(case.step) is None
    assert (error := contract.broken(case.step, cached_lens=(100, 4, 256))) is not None
    assert error.rule == "new_tokens"
    assert (error := contract.broken(case.step, q_lens=(4, 4))) is not None and error.rule == "uniform_q_len"
    replay = Contract(case.capacity, context=Context(graph=Graph.of(case.step)))
    assert replay.broken(case.step) is None
    case.step.seq_lens = case.step.seq_lens.clone()
    assert (error := replay.broken(case.step)) is not None and error.rule == "graph"


@pytest.mark.parametrize("name", ["q", "k", "page_table", "seq_lens", "sm_scale", "max_seq_len"])
@pytest.mark.parametrize("known", [False, True])
def test_what_is_no_operand_is_refused_and_raises_nothing(name: str, known: bool) -> None:
    case = kernels.made()
    contract = Contract(case.capacity, route="xqa-decode")
    if known:
        assert contract.broken(case.step, case.out) is None
    setattr(case.step, name, None)
    assert (error := contract.broken(case.step, case.out)) is not None
    assert error.rule in ("operands", "host_scales", "max_seq_len") and "\n" not in str(error)


def test_the_quick_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    case = kernels.made()
    contract = Contract(case.capacity, route="xqa-decode")
    asked = []

    def every_rule(*args: Any, **options: Any) -> None:
        asked.append(args)
        check_step(*args, **options)

    monkeypatch.setattr("autotune.routes.contract.check.check_step", every_rule)
    for _ in range(5):
        assert contract.broken(case.step, case.out) is None
        case.step.q = case.step.q.clone()  # the next layer's
    assert len(asked) == 1


def test_static_and_full_agree_on_a_right_call() -> None:
    for route in KERNELS:
        case = kernels.made(route)
        for level in Level:
            case.check(level)
