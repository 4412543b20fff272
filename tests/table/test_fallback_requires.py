"""What a fallback's proof assumed is stated, shown and withholds nothing; older tables do not state it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.domain.decision import Decision, Reason
from autotune.router import Router
from autotune.table.build import build_entries
from autotune.table.diff import compare
from autotune.table.dump import dump_table
from autotune.table.errors import TableError
from autotune.table.load import load_table
from autotune.table.model import RoutingTable
from tests.console import cli
from tests.table import samples
from tests.table.samples import FASTER, SLOWER, decided

ALL = (4, 4096)
CALL = ("--heads", "8/1/128", "--q-len", "4", "--kv", "64", "--facts", "table")


def table(assumed: tuple[str, ...] | None) -> RoutingTable:
    """Batch 1 answers the fallback, batch 2 a route, batch 4 one that asks for something itself."""
    cells = [decided(1, ALL, SLOWER), decided(2, ALL, FASTER)]
    cells += [decided(4, ALL, FASTER, requires=("finite_pool",))]
    cells += [decided(8, ALL, Decision(None, Reason.NO_SAFE_ROUTE))]
    return samples.table_of([replace(cell, fallback_requires=assumed) for cell in cells])


def test_an_entry_states_what_any_of_its_proofs_assumed() -> None:
    def stated(*assumed: tuple[str, ...] | None) -> tuple[str, ...] | None:
        cells = [decided(2**i, ALL, SLOWER, fallback_requires=each) for i, each in enumerate(assumed)]
        return build_entries(cells)[0].fallback_requires

    assert stated(None, None) is None
    assert stated(None, ()) == ()
    assert stated(("tail_padding_512",), None, ("finite_pool", "tail_padding_512")) == (
        "finite_pool",
        "tail_padding_512",
    )


@pytest.mark.parametrize("assumed", [None, (), ("finite_pool",)])
def test_it_is_written_and_read_again(assumed: tuple[str, ...] | None) -> None:
    data = dump_table(table(assumed))
    assert (b"fallback_requires" in data) == (assumed is not None)
    assert load_table(data) == table(assumed)
    assert load_table(data).entries[0].fallback_requires == assumed


@pytest.mark.parametrize("bad", ['["Be good"]', '["b", "a"]', '["a", "a"]', '"finite_pool"', "[1]", "null"])
def test_other_values_are_refused(bad: str) -> None:
    data = dump_table(table(("finite_pool",)))
    edited = samples.edited(data, 'fallback_requires: ["finite_pool"]', f"fallback_requires: {bad}")
    with pytest.raises(TableError, match="fallback_requires"):
        load_table(edited)


def test_bind_says_what_was_not_attested_and_withholds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table.yaml"
    path.write_bytes(dump_table(table(("finite_pool", "tail_padding_512"))))
    router = Router.load(path, facts=samples.FACTS)
    for _ in range(3):
        bound = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096, attests={"finite_pool"})
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == [
        "the fallback is proven only with tail_padding_512, which was not attested; it answers all the same"
    ]
    assert bound.assumes == ("tail_padding_512",)
    assert [bound.route(size, 4, 64) for size in (1, 2, 4, 8)] == [
        *(samples.FALLBACK, samples.SPLIT, samples.SPLIT, samples.FALLBACK)
    ]
    assumed = ("finite_pool", "tail_padding_512")
    # not of a route, of a fallback that is not safe, or of a call that nothing was proven for
    assert [bound.explain(size, 4, 64).assumes for size in (1, 2, 8, 3)] == [assumed, None, None, None]
    caplog.clear()
    told = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096, attests=assumed)
    assert told.assumes == () and told.explain(1, 4, 64).assumes == assumed
    refused = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096).explain(4, 4, 64)
    assert (refused.why, refused.assumes) == ("requires_not_attested", assumed)
    beyond = router.bind(samples.SHAPE, samples.DTYPES, max_context=9999)
    assert beyond.assumes == ()


def test_show_and_explain_say_it(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_bytes(dump_table(table(("finite_pool",))))
    assert f"(fallback {samples.FALLBACK}, proven with finite_pool; context 4096)" in cli("show", path).out
    assert cli("show", path, "--json").json["entries"][0]["fallback_requires"] == ["finite_pool"]
    said = "the fallback's proof assumes finite_pool"
    assert f"{said} (not attested)\n" in cli("explain", path, *CALL, "--batch", "1").out
    assert f"{said}\n" in cli("explain", path, *CALL, "--batch", "1", "--attest", "finite_pool").out
    named = cli("explain", path, *CALL, "--batch", "2", "--attest", "finite_pool").out
    assert named.startswith(samples.SPLIT) and "the fallback's proof" not in named
    assert cli("explain", path, *CALL, "--batch", "1", "--json").json["assumes"] == ["finite_pool"]


def test_an_older_table_says_that_it_does_not_state_it(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_bytes(dump_table(table(None)))
    assert f"(fallback {samples.FALLBACK}; context 4096)" in cli("show", path).out
    assert "assumes: not stated in this table" in cli("explain", path, *CALL, "--batch", "1").out
    path.write_bytes(dump_table(table(())))
    assert "assumes" not in cli("explain", path, *CALL, "--batch", "1").out


def test_a_difference_of_two_tables() -> None:
    (found,) = compare(table(()), table(("finite_pool",))).differences
    assert found == (f"requires of fallback {samples.FALLBACK}", (), ("finite_pool",), 1)
    assert compare(table(None), table(("finite_pool",))).same  # an older table says nothing to differ from
