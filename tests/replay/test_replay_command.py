"""``autotune run --replay`` on the recorded H200 study, and on files that are none."""

from __future__ import annotations

import json
import lzma
import math
import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from autotune.bench.objective import graph
from autotune.cli.context import all_routes, ask, target
from autotune.cli.filters import Filters
from autotune.replay.clock import RecordedClock
from autotune.replay.packing import pack
from autotune.replay.read import read_recording
from autotune.replay.recording import RecordedTiming, Recording
from autotune.replay.replay import replay
from autotune.replay.routes import recorded_routes
from autotune.replay.worker import RecordedWorker
from autotune.store.database import open_database
from autotune.tuner.scout import Scout
from autotune.worker.base import Runs
from tests.console import Result, cli

EVIDENCE = Path(__file__).resolve().parents[1] / "data" / "h200-evidence.db.xz"
# Ten cells: both shapes of decision, and one column whose decode kernel joined late
PART = ("--models", "qwen3.5-397b-a17b", "--attn-tp", "4", "--q-len", "8", "--batch", "1")


@pytest.fixture(scope="module")
def recording() -> Recording:
    return read_recording(EVIDENCE, lambda offers: offers[0][0])


def run(out: Path, *arguments: object, file: Path = EVIDENCE, gpu: str = "h200") -> Result:
    return cli("run", "--gpu", gpu, "--replay", file, "--out", out, *arguments)


@pytest.mark.parametrize(
    "filters",
    [
        # the decode kernel joined after 48 rounds
        Filters(models="qwen3.5-397b-a17b", attn_tp="4", q_len="8", batch="1,8"),
        # the fallback joined late: it was proven later than the two others
        Filters(models="qwen3.5-397b-a17b", attn_tp="1", q_len="6", batch="1"),
    ],
)
def test_stored_decisions_come_out_again(filters: Filters, recording: Recording) -> None:
    asked = ask("h200", "sglang,generic", None, filters)
    there = replace(target(asked, recording.study.fingerprint.facts), seed=recording.study.seed)
    found = replay(recording, there, recorded_routes(recording, all_routes("cuda")))
    answers = {each.item.cell.id: each for each in found.answers["sglang"]}
    decided = {cell: decision for cell, decision in recording.decisions.items() if cell in answers}
    assert len(decided) >= 5
    # the answers; bounds and medians are of fewer rounds, since a beaten route leaves the race earlier now
    # one that joined late, or claims by little, has more rounds ahead of it than were recorded: it is open
    cut = decided.keys() & found.unrecorded
    assert len(cut) <= 1
    found_now = {cell: answers[cell].decision for cell in decided.keys() - cut}
    differ = {
        cell
        for cell, it in found_now.items()
        if (it.route, it.reason) != (decided[cell].route, decided[cell].reason)
    }
    assert not differ  # a replay of a few cells has the whole study's tau
    assert found.tau is not None
    assert all(answers[cell].final for cell in found_now)
    assert {cell for cell, each in answers.items() if not each.final} == found.unrecorded


def test_twice_the_same_bytes_and_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def asked(*_: object) -> bool:
        raise AssertionError("a replay needs no device")

    for name in ("is_available", "init", "device_count", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, asked)
    written = []
    for folder in ("one", "two"):
        result = run(tmp_path / folder, *PART, "--budget", "12s")
        assert result.code == 0
        # what a run says of its progress, and nothing else
        assert re.fullmatch(r"cells: 10\n(\d+/10 cells, .* left; .*\n)*", result.err)
        assert "no table" in result.out
        assert [path.name for path in (tmp_path / folder).iterdir()] == ["replay.json"]
        written.append((tmp_path / folder / "replay.json").read_bytes())
    assert written[0] == written[1]
    document = json.loads(written[0])
    assert document["out_of_budget"]
    assert 12.0 <= document["seconds"] < document["recording"]["seconds"] / 10
    assert 0 < document["settled"] < document["cells"] == 10


def test_it_says_how_far_it_is_as_a_run_does(tmp_path: Path) -> None:
    result = run(tmp_path, *PART)
    assert result.code == 0
    first, *_, last = result.err.splitlines()
    assert first == "cells: 10"
    assert re.fullmatch(r"10/10 cells, \d+ cells/min, 0 s left; 10 not_faster", last)


def test_json_is_the_file_on_stdout(tmp_path: Path) -> None:
    result = run(tmp_path, *PART, "--trials", "1", "--json")
    assert result.code == 0
    written = json.loads((tmp_path / "replay.json").read_text("utf-8"))
    assert result.json == {**written, "file": str(tmp_path / "replay.json")}
    assert written["settled"] == 1


def text(path: Path) -> None:
    path.write_text("not a database\n")


def missing(path: Path) -> None:
    path.unlink(missing_ok=True)


def folder(path: Path) -> None:
    path.mkdir()


def cut_off(path: Path) -> None:
    path.write_bytes(EVIDENCE.read_bytes()[:100_000])


def packed_text(path: Path) -> None:
    path.write_bytes(lzma.compress(b"not a database"))


def cut_off_database(path: Path) -> None:
    whole = lzma.decompress(EVIDENCE.read_bytes())
    path.write_bytes(whole[: len(whole) // 2])


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    connection.close()


def no_study(path: Path) -> None:
    open_database(f"sqlite:///{path}").close()


def another_format(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE about (key TEXT, value TEXT)")
        connection.execute("INSERT INTO about VALUES ('format', 'autotune/recording/9')")
    connection.close()


def forged(key: str, value: object) -> Callable[[Path], None]:
    """The kept evidence with another value in what it says of its study."""

    def spoil(path: Path) -> None:
        path.write_bytes(lzma.decompress(EVIDENCE.read_bytes()))
        with sqlite3.connect(path) as connection:
            ((said,),) = connection.execute("SELECT value FROM about WHERE key = 'study'")
            changed = json.dumps({**json.loads(said), key: value})
            connection.execute("UPDATE about SET value = ? WHERE key = 'study'", (changed,))
        connection.close()

    return spoil


def forged_facts(path: Path) -> None:
    path.write_bytes(lzma.decompress(EVIDENCE.read_bytes()))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE about SET value = 'true' WHERE key = 'facts'")
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (forged("margin", -1e9), "cannot be .*margin must be"),
        (forged("multiplicity", ""), "cannot be .*multiplicity must be"),
        (forged_facts, "cannot be read"),
        (text, "neither an SQLite database nor one packed with xz"),
        (missing, "No such file"),
        (folder, "Is a directory"),
        (cut_off, "damaged or cut off"),
        (packed_text, "holds no SQLite database"),
        (cut_off_database, "copy it again|whole copy"),
        (foreign, "belongs to another program"),
        (no_study, "no study of --gpu h200.*it holds no study"),
        (another_format, "autotune/recording/9"),
    ],
)
def test_a_bad_file_is_one_line_and_writes_nothing(
    spoil: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    file = tmp_path / "bad.db"
    spoil(file)
    result = run(tmp_path / "out", *PART, file=file)
    assert result.code == 1
    assert str(file) in result.line
    assert re.search(says, result.line), result.line
    assert not (tmp_path / "out").exists()


def test_another_gpu_is_one_line(tmp_path: Path) -> None:
    result = run(tmp_path / "out", gpu="b200")
    assert result.code == 1
    assert "no study of --gpu b200" in result.line
    assert "it holds studies of NVIDIA H200" in result.line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [("--provers", 2), ("--devices", "all"), ("--db", "sqlite:///other.db")])
def test_flags_that_need_a_device_are_refused(flags: tuple[object, ...], tmp_path: Path) -> None:
    result = run(tmp_path / "out", *flags)
    assert result.code == 2
    assert "--replay" in result.line
    assert not (tmp_path / "out").exists()


def test_a_route_that_was_not_recorded_is_told(tmp_path: Path) -> None:
    result = run(tmp_path / "out", *PART, "--routes", "fa2,fa3")
    assert result.code == 1
    assert "route fa3 was not recorded; there are fa2, fmha-v2, xqa-decode" in result.line


def cut(timing: RecordedTiming, rounds: int) -> RecordedTiming:
    """As if the study had ended after so many of the cell's rounds."""
    return RecordedTiming(pack(timing.rounds[:rounds]), ((rounds, timing.seconds),))


def test_a_look_at_a_route_that_joined_late_is_answered(recording: Recording) -> None:
    asked = ask("h200", "sglang", None, Filters(models="llama-3.1-70b", dtype="bf16", q_len="4", batch="4"))
    there = replace(target(asked, recording.study.fingerprint.facts), seed=recording.study.seed)
    routes = recorded_routes(recording, all_routes("cuda"))
    # the fallback was timed beside it from round 152, 144, 120, 48 and 32 on
    short = {item.cell.id for item in asked.grid.cells if item.cell.kv_high in (1024, 4096)}
    assert len(short) == 2
    recording = replace(
        recording,
        timings={cell: cut(each, 120) if cell in short else each for cell, each in recording.timings.items()},
    )
    worker = cast(Runs, RecordedWorker(recording, routes, RecordedClock()))
    scout = Scout(worker, there, recording.study.seed)
    looks = {
        item.cell.kv_high: scout.look(item.cell, ("fmha-v2", "xqa-decode"), graph)
        for item in asked.grid.cells
    }
    assert {kv: set(look.times) for kv, look in looks.items() if look.times} == {
        16384: {"fmha-v2", "xqa-decode"},
        65536: {"fmha-v2", "xqa-decode"},
        131072: {"fmha-v2", "xqa-decode"},
    }
    assert all("not recorded" in looks[kv].said for kv in (1024, 4096))


def test_an_adaptive_search_replays_to_the_same_bytes(tmp_path: Path) -> None:
    traffic = tmp_path / "shapes.jsonl"
    traffic.write_text('{"batch": 1, "q_len": 4, "kv": 65536, "count": 9}\n')
    part = ("--models", "llama-3.1-70b", "--dtype", "bf16", "--q-len", "4", "--batch", "1")
    flags = (*part, "--engine", "sglang", "--strategy", "adaptive", "--traffic", traffic, "--budget", "60s")
    written = []
    for folder in ("one", "two"):
        assert run(tmp_path / folder, *flags).code == 0
        written.append((tmp_path / folder / "replay.json").read_bytes())
    assert written[0] == written[1]
    document = json.loads(written[0])
    assert document["settled"] > 0
    # one cell has all the traffic: what it gains is there before anything else is settled
    decided = [
        each for each in document["engines"]["sglang"]["decisions"] if each["what"].endswith("..65536")
    ]
    assert [each["route"] for each in decided] == ["xqa-decode"]
    assert len(document["gain"]["over_seconds"]) == 1
    assert document["gain"]["total"] == pytest.approx(9 * math.log(decided[0]["speedup"]), abs=1e-3)
