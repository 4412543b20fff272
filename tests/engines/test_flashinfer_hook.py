"""``flashinfer.install``: routed where decided, refused where the contract is broken, stock where we fail."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.engines import flashinfer
from autotune.engines.choice import RefusedCallError
from autotune.engines.environment import Miss, Mode
from autotune.engines.flashinfer import Hook
from autotune.engines.runtime import Runtime
from autotune.engines.suspects import Captured
from autotune.router import Router
from autotune.table.dump import write_table
from autotune.table.load import load_table
from autotune.table.model import Quarantine, Unsafe
from autotune.table.withdraw import Withdrawal
from autotune.table.withdraw import withdraw as quarantined
from tests.engines import standin, tables
from tests.engines.standin import Library, decode_call
from tests.table.samples import CUDA_FACTS


@pytest.fixture
def library() -> Iterator[Library]:
    with standin.installed() as found:
        yield found


def call(**arguments: Any) -> torch.Tensor:
    """As an engine calls it: by the module's attribute, at every layer."""
    module: Any = sys.modules["flashinfer.decode"]
    result: torch.Tensor = module.trtllm_batch_decode_with_kv_cache(**arguments)
    return result


def hook_of(tmp_path: Path, **options: Any) -> Hook:
    options.setdefault("attests", {"causal_mask"})
    return flashinfer.install(tables.router(tmp_path / "h200.yaml"), **options)


LENS = {1: (200,), 2: (200, 77), 4: (9, 64, 65, 300), 8: (64,) * 8, 16: (64,) * 16}


@pytest.mark.parametrize(
    ("batch", "miss", "called", "why"),
    [
        (1, "stock", "fmha_v2", "not_faster"),
        (2, "stock", "decode", "proven_faster"),
        (4, "stock", "decode", "rows_disagree"),
        (4, "fallback", "fmha_v2", "rows_disagree"),
        (8, "stock", "fmha_v2", "candidate_unsafe"),
        (16, "stock", "decode", "unproven"),
        (16, "fallback", "fmha_v2", "unproven"),
    ],
)
def test_every_kind_of_answer(
    tmp_path: Path, library: Library, batch: int, miss: str, called: str, why: str
) -> None:
    arguments = decode_call(LENS[batch])
    expected = call(**arguments)
    hook = hook_of(tmp_path, miss=miss)
    library.calls.clear()
    found = call(**arguments)
    assert library.called == [called]
    assert torch.equal(found, expected)
    assert [reason for _, reason in hook.counts] == [why]


def test_positional_calls_and_callers_that_imported_the_name_before(tmp_path: Path, library: Library) -> None:
    engine: Any = types.ModuleType("an_engine")
    engine.decode = sys.modules["flashinfer.decode"].trtllm_batch_decode_with_kv_cache
    before = engine.decode
    sys.modules["an_engine"] = engine
    try:
        hook = hook_of(tmp_path)
        arguments = decode_call((200,))
        head = [arguments.pop(name) for name in ("query", "kv_cache", "workspace_buffer", "block_tables")]
        engine.decode(*head, **arguments)
        assert library.called == ["fmha_v2"]
        hook.uninstall()
        assert engine.decode is before
        assert sys.modules["flashinfer"].trtllm_batch_decode_with_kv_cache is before
    finally:
        del sys.modules["an_engine"]


def test_observe_counts_and_calls_nothing_else(tmp_path: Path, library: Library) -> None:
    hook = hook_of(tmp_path, mode="observe")
    call(**decode_call((200,)))
    assert library.called == ["decode"]
    assert hook.counts == {("fmha-v2", "not_faster"): 1}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"block_tables": lambda c: c["block_tables"][:, :2].contiguous()}, "table_width"),
        ({"seq_lens": lambda c: c["seq_lens"].long()}, "seq_lens"),
        ({"mask": lambda c: None}, "draft_mask"),
        ({"workspace_buffer": lambda c: torch.empty(1024, dtype=torch.uint8)}, "workspace"),
        ({"query": lambda c: c["query"][:-1]}, "rows"),
        ({"bmm1_scale": lambda c: 0.0}, "scales"),
    ],
)
def test_a_proven_call_that_breaks_the_contract_is_refused(
    tmp_path: Path, library: Library, change: dict[str, Any], rule: str
) -> None:
    arguments = decode_call((100, 77))
    arguments.update({name: make(arguments) for name, make in change.items()})
    hook = hook_of(tmp_path)
    assert f"contract rule {rule}" in hook.explain(**arguments)
    hook.uninstall()
    safe = hook_of(tmp_path, miss="fallback")
    said = safe.explain(**arguments)
    served = said.startswith("fmha-v2")
    # what no kernel can take is left to the engine; what the context kernel can take, it gets
    assert served == (rule in {"table_width", "draft_mask", "workspace"})


def test_the_seeds_fault_is_refused_and_served_by_the_fallback(tmp_path: Path, library: Library) -> None:
    """Prefill-shaped metadata: lengths without the new tokens, a table as narrow as they need."""
    right = decode_call((132, 68))
    wrong = dict(right)
    wrong["seq_lens"] = right["seq_lens"] - 4
    wrong["block_tables"] = right["block_tables"][:, :2].contiguous()
    with pytest.raises(standin.IllegalAccessError):
        call(**wrong)
    hook = hook_of(tmp_path, miss="fallback")
    library.calls.clear()
    call(**wrong)
    assert library.called == ["fmha_v2"]
    assert library.calls[0][1]["max_kv_len"] == 128  # no further than the table reaches
    assert hook.counts == {("fmha-v2", "contract"): 1}
    call(**right)
    assert library.called == ["fmha_v2", "decode"]
    assert hook.counts["xqa-decode", "proven_faster"] == 1


@pytest.mark.parametrize("batch", LENS)
def test_a_table_too_narrow_is_served_by_the_fallback_whatever_the_cell_says(
    tmp_path: Path, library: Library, batch: int
) -> None:
    """Where the answer is the fallback anyhow, a refusal must not send the call to the decode kernel."""
    wrong = decode_call((*(min(kv_len, 128) for kv_len in LENS[batch][:-1]), 200))
    wrong["block_tables"] = wrong["block_tables"][:, :3].contiguous()
    hook = hook_of(tmp_path, miss="fallback")
    call(**wrong)
    assert library.called == ["fmha_v2"]
    assert library.calls[0][1]["max_kv_len"] == 192
    assert hook.counts == {("fmha-v2", "contract"): 1}
    hook.uninstall()
    library.calls.clear()
    stock = hook_of(tmp_path)
    with pytest.raises(standin.IllegalAccessError):
        call(**wrong)
    assert library.called == ["decode"] and stock.counts == {("xqa-decode", "contract"): 1}


@pytest.mark.parametrize("batch", LENS)
def test_a_mask_hides_no_broken_contract(tmp_path: Path, library: Library, batch: int) -> None:
    wrong = decode_call((*(min(kv_len, 128) for kv_len in LENS[batch][:-1]), 200))
    wrong["block_tables"] = wrong["block_tables"][:, :3].contiguous()
    hook = hook_of(tmp_path, miss="fallback", attests=())
    said = hook.explain(**wrong)
    assert "contract rule table_width" in said and 'attests={"causal_mask"}' in said
    with pytest.raises(standin.IllegalAccessError):
        call(**wrong)
    assert library.called == ["decode"] and hook.counts == {("xqa-decode", "contract"): 1}


def test_left_alone_where_an_argument_says_more(tmp_path: Path, library: Library) -> None:
    hook = hook_of(tmp_path, miss="fallback")
    ragged = decode_call((200,)) | {"max_q_len": 4, "cum_seq_lens_q": torch.tensor([0, 4])}
    assert hook.explain(**ragged) == "left alone: argument max_q_len is given"
    two = decode_call((200,)) | {"sinks": [torch.zeros(8), torch.zeros(8)]}
    assert hook.explain(**two) == "left alone: several sinks are given"
    call(**ragged)
    assert library.called == ["decode"]


def test_a_kernel_that_fails_is_replaced_by_the_engines_own(
    tmp_path: Path, library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    hook_of(tmp_path)
    library.fail["fmha_v2"] = RuntimeError("no such kernel was built")
    arguments = decode_call((200,))
    for _ in range(3):
        call(**arguments)
    assert library.called == ["fmha_v2", "decode"] * 3
    assert caplog.text.count("no such kernel was built") == 1


def test_no_kernel_is_replaced_by_one_that_is_refused(tmp_path: Path, library: Library) -> None:
    """A module that was not built must not send the call to the decode kernel that it was kept from."""
    wrong = decode_call((132, 68))
    wrong["block_tables"] = wrong["block_tables"][:, :2].contiguous()
    unsafe = decode_call(LENS[8])
    hook = hook_of(tmp_path, miss="fallback")
    library.fail["fmha_v2"] = RuntimeError("no such kernel was built")
    for arguments, why in ((wrong, "contract rule table_width"), (unsafe, "xqa-decode is refused here")):
        with pytest.raises(RefusedCallError, match=why) as caught:
            call(**arguments)
        assert "no such kernel was built" in str(caught.value) and "\n" not in str(caught.value)
    assert library.called == ["fmha_v2", "fmha_v2"]
    assert set(hook.counts) == {("fmha-v2", "contract"), ("fmha-v2", "candidate_unsafe")}


@pytest.mark.parametrize(
    ("accused", "refuses"), [("xqa-decode", True), ("fa2-decode", False)], ids=["its own", "another"]
)
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_what_is_refused_is_the_engines_own_kernel_and_no_other_candidate(
    tmp_path: Path, library: Library, batch: int, accused: str, refuses: bool
) -> None:
    """A quarantine leaves the letter of a cell where its route was slower; a letter names no candidate."""
    table = tables.table()
    unsafe = Unsafe(accused, "8/1/128 page 64 bf16/bf16 q_len 4 batch 8", "wrong_output", "", "")
    gone = Quarantine(accused, "it faulted", "2026-01-01T00:00:00Z")
    path = tmp_path / "h200.yaml"
    write_table(quarantined(replace(table, unsafe=(unsafe,)), [gone]), path)
    library.fail["fmha_v2"] = RuntimeError("no such kernel was built")
    router = Router.load(path, facts=CUDA_FACTS)
    flashinfer.install(router, attests={"causal_mask"})
    if refuses:
        with pytest.raises(RefusedCallError, match=r"xqa-decode is refused here .quarantined: it faulted"):
            call(**decode_call(LENS[batch]))
    else:
        call(**decode_call(LENS[batch]))
    assert ("decode" in library.called) is not refuses


def test_a_captured_stand_in_that_is_withdrawn_later_wants_a_recapture(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The letter of the cell, where it was only slower, stays what it was."""
    monkeypatch.setattr(flashinfer, "capturing", lambda: True)
    hook = hook_of(tmp_path)
    library.fail["fmha_v2"] = RuntimeError("no such kernel was built")
    call(**decode_call(LENS[1]))
    assert library.called == ["fmha_v2", "decode"] and not list(hook.runtime.status.recapture)
    gone = Quarantine("xqa-decode", "it faulted", "2026-01-01T00:00:00Z")
    path = tmp_path / "h200.yaml"
    write_table(quarantined(load_table(path), [gone]), path)
    assert hook.runtime.router.poll(0.0)
    (found,) = hook.runtime.status.recapture
    assert (found.batch_size, found.captured) == (1, "xqa-decode")


def test_a_dead_context_is_not_retried_and_names_its_suspects(tmp_path: Path, library: Library) -> None:
    router = tables.router(tmp_path / "h200.yaml")
    captured = Captured(tmp_path, "flashinfer", table="t", digest="d")
    flashinfer.install(Runtime(router, engine="flashinfer", captured=captured, attests=["causal_mask"]))
    library.fail["fmha_v2"] = standin.IllegalAccessError()
    with pytest.raises(standin.IllegalAccessError):
        call(**decode_call((200,)))
    assert library.called == ["fmha_v2"]
    assert "fmha-v2" in captured.path.read_text() and "illegal memory access" in captured.path.read_text()


@pytest.mark.parametrize("broken", ["router", "chooser", "count"])
def test_our_own_failures_are_stock(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    hook = hook_of(tmp_path)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug of ours")

    if broken == "router":
        monkeypatch.setattr(Runtime, "chooser", fail)
    elif broken == "chooser":
        monkeypatch.setattr("autotune.engines.choice.Chooser.choose", fail)
    else:
        monkeypatch.setattr(Runtime, "note", fail)
    call(**decode_call((200,)))
    assert library.called == ["decode"]
    assert hook.explain is not None


def test_inactive_table_changes_nothing(tmp_path: Path, library: Library) -> None:
    path = tables.write(tmp_path / "h200.yaml")
    path.write_bytes(path.read_bytes().replace(b"8", b"9", 1))
    hook = flashinfer.install(path, facts=CUDA_FACTS, miss=Miss.FALLBACK, state=tmp_path)
    assert hook.runtime.router.status.state == "inactive"
    call(**decode_call((200,)))
    assert library.called == ["decode"] and hook.counts == {}
    hook.uninstall()


def test_installed_once_and_removed(tmp_path: Path, library: Library) -> None:
    module = sys.modules["flashinfer.decode"]
    before = module.trtllm_batch_decode_with_kv_cache
    hook_of(tmp_path)
    with pytest.raises(ValueError, match="hooked already"):
        hook_of(tmp_path)
    assert flashinfer.uninstall() and not flashinfer.uninstall()
    assert module.trtllm_batch_decode_with_kv_cache is before


def test_unknown_mode_is_refused(tmp_path: Path, library: Library) -> None:
    with pytest.raises(ValueError, match="sometimes"):
        hook_of(tmp_path, mode="sometimes")
    assert Mode("route") is Mode.ROUTE


def test_an_interleaved_pool_is_another_kind_than_the_fused_one(tmp_path: Path, library: Library) -> None:
    hook = hook_of(tmp_path, miss="stock")
    arguments = decode_call((200,))
    pool = torch.zeros((9, 2, 1, 64, 128), dtype=torch.bfloat16)
    assert "shape_not_in_table" in hook.explain(**{**arguments, "kv_cache": pool})


@pytest.mark.parametrize("miss", ["stock", "fallback"])
def test_vllms_packed_cache_is_not_looked_up_as_two_pools(
    tmp_path: Path, library: Library, miss: str
) -> None:
    """K and V of a token in one row: neither the fused pool of the table nor two dense ones."""
    hook = hook_of(tmp_path, miss=miss)
    rows = torch.zeros((9, 1, 64, 256), dtype=torch.bfloat16)
    arguments = {**decode_call((200,)), "kv_cache": (rows[..., :128], rows[..., 128:]), "kv_layout": "HND"}
    assert "shape_not_in_table" in hook.explain(**arguments)
    call(**arguments)
    assert library.called[-1] == "decode"


def test_a_pool_with_gaps_is_left_alone(tmp_path: Path, library: Library) -> None:
    hook = hook_of(tmp_path, miss="fallback")
    rows = torch.zeros((9, 2, 1, 64, 256), dtype=torch.bfloat16)[:, 0]  # two layers' pages in turn
    arguments = {**decode_call((200,)), "kv_cache": (rows[..., :128], rows[..., 128:]), "kv_layout": "HND"}
    assert "lie in no pool that a table has (strides (32768, " in hook.explain(**arguments)
    call(**arguments)
    assert library.called == ["decode"]


def test_a_pool_is_known_by_vs_strides_too(tmp_path: Path, library: Library) -> None:
    """Alike but for V's strides, and called after the one that the table has."""
    hook = hook_of(tmp_path)
    arguments = decode_call((200,))
    k, v = arguments["kv_cache"]
    hook.explain(**arguments)
    odd = v.as_strided(v.shape, (v.stride(0) // 2, *v.stride()[1:]))
    assert "lie in no pool that a table has" in hook.explain(**{**arguments, "kv_cache": (k, odd)})
    half = {**arguments, "kv_cache": (k, v.view(torch.float16))}
    assert "operands are" in hook.explain(**half)


def test_a_router_that_was_suspended_is_asked_anew(tmp_path: Path, library: Library) -> None:
    hook = hook_of(tmp_path)
    arguments = decode_call((200,))  # within the table, answered by the context kernel
    call(**arguments)
    router = hook.runtime.router
    router.suspend("ranks hold different tables")
    call(**arguments)
    router.resume()
    call(**arguments)
    assert library.called == ["fmha_v2", "decode", "fmha_v2"]


def withdraw(path: Path, *, batch: tuple[int, ...] = ()) -> None:
    """``autotune quarantine`` of the decode kernel."""
    table = load_table(path)
    told = Withdrawal("xqa-decode", batch_size=batch) if batch else Withdrawal("xqa-decode")
    write_table(quarantined(table, told.items(table, "it faulted", "2026-01-01T00:00:00Z")), path)


def test_a_mask_that_may_be_a_trees_keeps_the_kernel_that_reads_it(tmp_path: Path, library: Library) -> None:
    hook = hook_of(tmp_path, attests=(), miss="fallback")
    arguments = decode_call((200,))  # the context kernel's, which attends causally
    call(**arguments)
    assert library.called == ["decode"] and hook.counts == {("xqa-decode", "mask"): 1}
    assert 'attests={"causal_mask"}' in hook.explain(**arguments)
    call(**{**arguments, "mask": None})
    assert library.called == ["decode", "fmha_v2"]
    hook.uninstall()
    attested = hook_of(tmp_path)
    for mask in (torch.zeros(3), arguments["mask"].to(torch.int32), arguments["mask"][:, :2], "causal"):
        assert "the mask is" in attested.explain(**{**arguments, "mask": mask})
    assert attested.explain(**arguments).startswith("fmha-v2")


def test_false_is_no_default_but_its_own() -> None:
    judge = flashinfer._is_default
    assert judge(None, True) and judge(False, False) and judge(1.0, 1.0)
    assert not judge(False, True) and not judge(False, None) and not judge(False, 0) and not judge(0, False)


def test_a_loaded_table_is_watched_and_what_it_called_is_on_disk(tmp_path: Path, library: Library) -> None:
    path, state = tables.write(tmp_path / "h200.yaml"), tmp_path / "state"
    hook = flashinfer.install(path, facts=CUDA_FACTS, state=state, attests=["causal_mask"])
    call(**decode_call((200,)))
    (record,) = state.glob("suspects-flashinfer-*.json")
    assert "fmha-v2" in record.read_text() and str(path) in record.read_text()
    watch = hook._watch
    assert watch is not None
    states = [watch.alive]
    withdraw(path)
    end = time.monotonic() + 60
    while "quarantined" not in hook.explain(**decode_call((200, 77))) and time.monotonic() < end:
        time.sleep(0.05)
    assert "quarantined" in hook.explain(**decode_call((200, 77)))
    hook.uninstall()
    states.append(watch.alive)
    assert states == [True, False] and record.exists()
    assert hook.runtime.captured is not None
    hook.runtime.captured.close()
    assert not record.exists()


def test_a_reload_while_a_kind_is_bound_mixes_no_two_tables(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = hook_of(tmp_path)
    bind = Router.bind
    binds: list[int] = []

    def reloaded(self: Router, *args: Any, **kwargs: Any) -> Any:
        if not binds:
            withdraw(tmp_path / "h200.yaml")
            assert self.poll(0.0)
        binds.append(self.generation)
        return bind(self, *args, **kwargs)

    monkeypatch.setattr(Router, "bind", reloaded)
    assert "quarantined" in hook.explain(**decode_call((200, 77)))
    assert len(binds) == 2


def test_a_graph_that_holds_the_engines_own_kernel_is_out_of_date_when_that_is_withdrawn(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that disagree: the router names ``fmha-v2``, ``xqa-decode`` is recorded."""
    monkeypatch.setattr(flashinfer, "capturing", lambda: True)
    hook = hook_of(tmp_path)
    call(**decode_call(LENS[4]))
    router = hook.runtime.router
    assert library.called == ["decode"] and not hook.runtime.status.recapture
    withdraw(tmp_path / "h200.yaml")
    assert router.poll(0.0)
    assert router.status.recapture == ()  # it noted nothing
    (stale,) = hook.runtime.status.recapture
    assert (stale.captured, stale.now) == ("xqa-decode", "fmha-v2")
    assert "recapture needed: " in hook.runtime.status.reason
    call(**decode_call(LENS[4]))  # captured again
    assert hook.runtime.status.recapture == ()


def test_a_refused_call_is_noted_by_what_served_it(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table names ``xqa-decode``; ``fmha-v2`` is recorded, and stays right when that goes."""
    monkeypatch.setattr(flashinfer, "capturing", lambda: True)
    hook = hook_of(tmp_path, miss="fallback")
    arguments = decode_call((100, 77))
    arguments["block_tables"] = arguments["block_tables"][:, :2].contiguous()
    call(**arguments)
    assert library.called == ["fmha_v2"]
    ((key, note),) = hook.runtime.captures._notes.items()
    assert key[2:] == (512, 2, 4) and note.ran == "fmha-v2" and note.choice.why == "proven_faster"
    assert hook.runtime.status.recapture == ()
    withdraw(tmp_path / "h200.yaml")
    assert hook.runtime.router.poll(0.0)
    assert hook.runtime.router.status.recapture == hook.runtime.status.recapture == ()


def test_a_graph_that_holds_what_the_table_named_is_in_both_reports(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "capturing", lambda: True)
    hook = hook_of(tmp_path)
    call(**decode_call(LENS[2]))
    withdraw(tmp_path / "h200.yaml")
    assert hook.runtime.router.poll(0.0)
    for status in (hook.runtime.router.status, hook.runtime.status):
        (stale,) = status.recapture
        assert (stale.captured, stale.now, stale.why) == ("xqa-decode", "fmha-v2", "quarantined")
        assert status.reason.count("recapture needed") == 1


@pytest.mark.parametrize("lens", [LENS[2], (64, 65, 66)])
def test_a_fallback_that_was_withdrawn_serves_no_refused_call_and_no_miss(
    tmp_path: Path, library: Library, lens: tuple[int, ...]
) -> None:
    path = tables.write(tmp_path / "h200.yaml")
    table = load_table(path)
    gone = Withdrawal("fmha-v2").items(table, "it faulted", "2026-01-01T00:00:00Z")
    write_table(quarantined(table, gone), path)
    flashinfer.install(Router.load(path, facts=CUDA_FACTS), miss="fallback", attests={"causal_mask"})
    arguments = decode_call(lens)
    call(**arguments)
    call(**{**arguments, "block_tables": arguments["block_tables"][:, :5].contiguous()})
    assert library.called == ["decode", "decode"]


@pytest.mark.parametrize("longest", [500, 512])
def test_a_table_that_reaches_past_max_seq_len_is_served_by_the_fallback(
    tmp_path: Path, library: Library, longest: int
) -> None:
    """Page tables end with whole pages, and some have one to spare."""
    arguments = decode_call((200, 77)) | {"max_seq_len": longest, "mask": None}
    arguments["block_tables"] = torch.cat(
        [arguments["block_tables"], arguments["block_tables"][:, :1]], 1
    ).contiguous()
    hook_of(tmp_path, miss="fallback")
    call(**arguments)
    assert library.called == ["fmha_v2"] and library.calls[0][1]["max_kv_len"] == longest
