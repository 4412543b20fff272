"""Tables of one H200 under two FlashInfer releases (``autotune run`` on 20 cells of Llama-3.1-70B)."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.router import Router
from autotune.table.diff import compare
from autotune.table.load import load_table
from tests.console import cli

FOLDER = Path(__file__).resolve().parents[1] / "data" / "two-versions"
OLD, NEW = "0.6.18.post1", "0.7.2"
ENGINES = ("sglang", "generic")


@pytest.mark.parametrize("engine", ENGINES)
def test_no_letter_differs_between_the_releases(engine: str) -> None:
    first, second = (load_table(FOLDER / f"{version}.{engine}.yaml") for version in (NEW, OLD))
    assert {first.facts.software["flashinfer"], second.facts.software["flashinfer"]} == {NEW, OLD}
    assert first.facts.hardware == second.facts.hardware
    found = compare(first, second)
    assert (found.changes, found.places) == ((), 20)
    told = cli("diff", FOLDER / f"{NEW}.{engine}.yaml", FOLDER / f"{OLD}.{engine}.yaml")
    assert told.code == 0, told.err
    assert "letters differ in 0 of the 20 cells that both have" in told.out
    assert "software.flashinfer " in told.out


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("table", "here"), [(NEW, OLD), (OLD, NEW)])
def test_the_router_refuses_each_under_the_other(engine: str, table: str, here: str) -> None:
    facts = load_table(FOLDER / f"{here}.{engine}.yaml").facts
    path = FOLDER / f"{table}.{engine}.yaml"
    refused = Router.load(path, facts=facts).status
    assert refused.state == "inactive"
    assert f"software.flashinfer: table '{table}', here '{here}'" in refused.reason
    own = Router.load(path, facts=load_table(path).facts)
    assert own.status.state == "active"
    (entry, *_) = load_table(path).entries
    bound = own.bind(entry.shape.to_dict(), entry.dtypes.to_dict(), max_context=entry.max_context)
    assert bound.route(batch_size=64, q_len=4, max_kv_len=1024) == "xqa-decode"
