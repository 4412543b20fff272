"""Second processes for real: torch kernels in fresh children, and a kill -9 in the middle of them."""

from __future__ import annotations

import json
import signal

import pytest

from autotune.bench.shift import shift, tau_of
from autotune.table.load import load_table
from autotune.tuner.sample import ROUNDS
from tests.console import SIX, Place, Script, cli

CELLS = 6


def shifts(place: Place) -> dict[str, list[float]]:
    """Of every cell, from the rows alone: nothing of the code under test but the last step."""

    def ratios(rows: list[tuple[str]]) -> list[float]:
        rounds = [each for (text,) in rows for each in json.loads(text)]
        return [each["run_us"]["torch-sdpa"] / each["run_us"]["torch-splitkv"] for each in rounds]

    found = {}
    for (cell,) in place.rows("SELECT DISTINCT cell_id FROM recheck"):
        first = place.rows(f"SELECT rounds FROM round_chunk WHERE cell_id = '{cell}' ORDER BY first_round")
        whole = place.rows(
            f"SELECT process FROM recheck WHERE cell_id = '{cell}' AND sampled GROUP BY process"
            f" HAVING sum(size) >= {ROUNDS} ORDER BY process LIMIT 1"
        )
        ((process,),) = whole
        again = place.rows(f"SELECT rounds FROM recheck WHERE cell_id = '{cell}' AND process = {process}")
        found[cell] = [shift(ratios(first), ratios(again))]
    return found


@pytest.mark.timeout(300)
def test_killed_between_a_chunk_and_what_follows_from_it(tested: Place) -> None:
    flags = [*tested.flags(SIX), "--budget", "10m"]
    run = Script(["run", *flags], tested.folder)
    run.until(lambda: tested.count("recheck") >= 2, timeout_s=180.0)
    run.send(signal.SIGKILL)
    assert run.end().code == -signal.SIGKILL
    run.assert_nothing_left()
    before = tested.rows("SELECT cell_id, process, first_round, rounds FROM recheck ORDER BY 1, 2, 3")
    assert tested.count("decision") == CELLS
    result = cli("run", *flags, "--json")
    assert result.code == 0, result.err
    summary = result.json
    # what was committed stands, under its numbers
    after = tested.rows("SELECT cell_id, process, first_round, rounds FROM recheck ORDER BY 1, 2, 3")
    assert set(before) <= set(after)
    assert tested.count("recheck", "sampled AND process = 1 AND first_round = 0") == CELLS
    # tau, the margin and every answer follow from the rows, in a process that measures nothing too
    table = load_table(tested.table)
    assert table.policy.tau == summary["tau"] == tau_of(shifts(tested))
    assert table.policy.tau is not None
    assert table.policy.margin == summary["margin"] == max(0.05, round(3 * table.policy.tau, 6))
    again = cli("export", *tested.flags(SIX), "--json")
    assert again.code == 0, again.err
    assert load_table(tested.table).entries == table.entries
    assert load_table(tested.table).policy == table.policy
    decided = dict(tested.rows("SELECT cell_id, reason FROM decision"))
    reasons: dict[str, int] = {}
    for reason in decided.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    assert again.json["reasons"] == reasons
    shown = cli("show", tested.table)
    assert f"tau {table.policy.tau:g}" in " ".join(shown.out.split())
