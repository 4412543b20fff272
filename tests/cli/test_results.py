"""What the commands print about a finished run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from autotune.cli import output
from autotune.domain.decision import Decision, Reason
from autotune.hardware.collect import collect
from autotune.report.summary import unproven
from autotune.router import Router
from autotune.table.dump import write_table
from autotune.table.load import load_table
from tests.console import Place, Result, cli, columns_of

CALL = ["--heads", "8/1/128", "--dtype", "fp32", "--q-len", "2"]


def test_the_router_says_what_the_table_says(finished: tuple[Place, Result]) -> None:
    place, result = finished
    table = load_table(place.table)
    router = Router.load(place.table, facts=collect("cpu", threads=1), fallback="torch-sdpa")
    assert router.status.state == "active"
    assert router.digest == table.digest == result.json["digest"]
    (entry,) = table.entries
    bound = router.bind(entry.shape, entry.dtypes, max_context=entry.max_context)
    reasons = {"proven_faster": 0}
    for row in entry.routes.rows:
        for size, letter in zip(entry.batch_size, row.letters, strict=True):
            answer = bound.route(size, 2, row.kv_high)
            route = table.legend[letter] if letter not in ".!?x#q" else "torch-sdpa"
            assert answer == route
            reasons["proven_faster"] += route != "torch-sdpa"
    assert reasons["proven_faster"] == result.json["reasons"].get("proven_faster", 0)
    assert bound.route(3, 2, 64) == "torch-sdpa"  # a batch size that was not proven
    assert {(column.batch_size, column.q_len) for column in columns_of(place)} == {(1, 2), (2, 2)}


def test_export_writes_the_table_again(done: Place, finished: tuple[Place, Result]) -> None:
    result = cli("export", *done.flags(), "--json")
    assert result.code == 0, result.err

    def lasting(path: Path) -> list[str]:
        lines = path.read_text().splitlines()
        return [line for line in lines if not line.startswith(("generated:", "digest:", "  at:"))]

    assert lasting(done.table) == lasting(finished[0].table)
    assert result.json["answers"] == finished[1].json["answers"]
    assert result.json["settled"] == result.json["cells"]
    assert done.count("export") == 2
    (hardware,) = done.rows("SELECT id FROM hardware")[0]
    assert cli("export", *done.flags(), "--hardware", hardware[:6]).code == 0
    assert cli("export", *done.flags(), "--hardware", "zzz").code == 1


def test_a_table_that_loses_cells_is_said_to(done: Place, finished: tuple[Place, Result]) -> None:
    kept = load_table(finished[0].table)
    (entry,) = kept.entries
    other = dataclasses.replace(entry, q_len=entry.q_len + 1)
    done.out.mkdir(exist_ok=True)
    write_table(dataclasses.replace(kept, entries=(entry, other)), done.table)
    result = cli("export", *done.flags())
    assert result.code == 0
    rows = len(entry.routes.rows) * len(entry.batch_size)
    assert f"{done.table}: the table that was there had {rows} cells that this one has not" in result.err
    policy = kept.policy._replace(objective="step")
    write_table(dataclasses.replace(kept, policy=policy), done.table)
    said = (
        f"{done.table}: the table that was there was decided by step, this one is by {kept.policy.objective}"
    )
    assert said in cli("export", *done.flags()).err
    done.table.write_text("no table")
    assert cli("export", *done.flags()).err == cli("export", *done.flags()).err == ""


def test_export_without_a_study(done: Place) -> None:
    result = cli("export", "--gpu", "cpu", "--db", done.url, "--out", done.out)
    assert result.code == 1
    assert "no study of --gpu cpu" in result.line
    missing = cli("export", "--gpu", "cpu", "--db", f"sqlite:///{done.folder}/typo.db")
    assert missing.code == 1
    assert "no such database" in missing.line
    assert not (done.folder / "typo.db").exists()


def test_show(finished: tuple[Place, Result]) -> None:
    place, _ = finished
    text = cli("show", place.table)
    assert text.code == 0
    assert text.err == ""
    assert "8/1/128 page 16 fp32/fp32/fp32 q_len 2" in text.out
    assert "<= 128 " in text.out
    assert "\x1b" not in text.out
    # a line is never broken: the instruction sets are one line however many there are
    isa = str(collect("cpu", threads=1).hardware["isa"])
    assert isa in text.out
    shown = cli("show", place.table, "--json").json
    assert shown["digest"] == load_table(place.table).digest
    assert shown["entries"][0]["batch_size"] == [1, 2]
    assert shown["entries"][0]["fallback_requires"] == []


def test_colour_only_on_a_terminal(finished: tuple[Place, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Console(highlight=False, width=100_000, force_terminal=True, color_system="standard")
    monkeypatch.setattr(output, "_stdout", terminal)
    assert "\x1b[" in cli("show", finished[0].table).out


def test_explain(finished: tuple[Place, Result]) -> None:
    table = finished[0].table
    inside = cli("explain", table, *CALL, "--batch", "1", "--kv", "64", "--json")
    assert inside.code == 0, inside.err
    assert inside.json["status"]["state"] == "active"
    assert inside.json["why"] in ("proven_faster", "not_faster")
    assert inside.json["proven"] == (inside.json["answer"] != "torch-sdpa")
    outside = cli("explain", table, *CALL, "--batch", "3", "--kv", "64", "--json").json
    assert (outside["why"], outside["proven"]) == ("batch_size_not_proven", False)
    beyond = cli("explain", table, *CALL, "--batch", "1", "--kv", "129", "--json").json
    assert beyond["why"] == "kv_len_not_proven"
    longer = cli("explain", table, *CALL, "--batch", "1", "--max-context", "256", "--json").json
    assert longer["why"] == "max_context_not_proven"
    text = cli("explain", table, *CALL, "--batch", "1")
    assert text.code == 0
    assert "router active" in text.out


def test_explain_with_other_facts(finished: tuple[Place, Result], tmp_path: Path) -> None:
    table = finished[0].table
    facts = tmp_path / "facts.json"
    data = collect("cpu", threads=1).to_dict()
    facts.write_text(json.dumps(data))
    call = ["explain", table, *CALL, "--batch", "1", "--json", "--facts"]
    assert cli(*call, facts).json["status"]["state"] == "active"
    assert cli(*call, "table").json["status"]["state"] == "active"
    data["hardware"]["name"] = "Another CPU"
    facts.write_text(json.dumps(data))
    other = cli(*call, facts).json
    assert (other["status"]["state"], other["why"], other["proven"]) == ("inactive", "router_inactive", False)
    missing = cli(*call, tmp_path / "none.json")
    assert missing.code == 2
    assert "none.json" in missing.line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--heads", "8/1", "--batch", "1", "--q-len", "2"], "--heads 8/1"),
        (["--heads", "a/b/c", "--batch", "1", "--q-len", "2"], "--heads a/b/c"),
        ([*CALL, "--batch", "0"], "--batch"),
        (["--heads", "8/1/128", "--dtype", "fp64", "--batch", "1", "--q-len", "2"], "--dtype fp64"),
        (["--heads", "8/2/128", "--dtype", "fp32", "--batch", "1", "--q-len", "2"], "it has 8/1/128 fp32"),
        ([*CALL, "--batch", "1", "--window", "127"], "--window 127"),
    ],
)
def test_explain_asked_wrongly(flags: list[str], said: str, finished: tuple[Place, Result]) -> None:
    result = cli("explain", finished[0].table, *flags)
    assert result.code == 2
    assert said in result.line


@pytest.mark.parametrize("command", [["show"], ["explain", *CALL, "--batch", "1"]])
def test_a_table_that_must_not_be_used(
    command: list[str], finished: tuple[Place, Result], tmp_path: Path
) -> None:
    good = finished[0].table.read_bytes()
    bad = tmp_path / "table.yaml"
    newer = good[: good.rindex(b"digest: ")].replace(b"routing-table/1", b"routing-table/2")
    newer += f'digest: "sha256:{hashlib.sha256(newer).hexdigest()}"\n'.encode()
    for text, said in (
        (newer, "routing-table/2"),
        (good.replace(b'"torch-sdpa"', b'"torch-xdpa"', 1), "digest"),
        (good[:200], "truncated"),
        (b"", "not a table"),
        (b"\x00\xff", "not a table"),
    ):
        bad.write_bytes(text)
        result = cli(command[0], bad, *command[1:])
        assert result.code == 2
        assert str(bad) in result.line
        assert said in result.line


def test_plan_of_a_gpu_that_is_not_here() -> None:
    result = cli("plan", "--gpu", "b200", "--json")
    assert result.code == 0
    assert result.err == ""
    plan = result.json
    assert plan["gpu"] == "b200"
    assert plan["cells"] == sum(
        len(entry["kv_len"]) * (len(entry["batch_size"]) + len(entry["eager"])) for entry in plan["entries"]
    )
    again = plan["second_timings"]
    assert again["cells"] == 24  # of the sample that tau is measured on
    assert 0 < again["near_claim_seconds_at_most"] < again["seconds"] < plan["estimated_seconds"]
    assert plan["fallback"][0] == "trtllm-gen-context"
    text = cli("plan", "--gpu", "b200", "--engine", "sglang")
    assert text.code == 0
    assert f"{plan['gpu']}: NVIDIA B200" in text.out
    assert "to time 24 cells again in other processes (tau); each near claim adds up to" in text.out
    few = cli("plan", "--gpu", "b200", "--kv", "1024", "--batch", "1", "--q-len", "1", "--dtype", "bf16")
    assert few.code == 0
    assert "second timings: none, too few cells" in few.out


def test_a_part_of_a_space() -> None:
    part = cli(
        *("plan", "--gpu", "h200", "--json", "--models", "llama-3.1-70b", "--attn-tp", "8"),
        *("--dtype", "bf16,fp8", "--q-len", "2,4", "--batch", "1, 8", "--kv", "4096"),
    )
    assert part.code == 0, part.err
    assert (part.json["columns"], part.json["cells"]) == (8, 8)
    assert {entry["q_len"] for entry in part.json["entries"]} == {2, 4}
    assert all(entry["kv_len"] == [4096] for entry in part.json["entries"])
    assert all(entry["models"] == ["llama-3.1-70b @ attn_tp 8"] for entry in part.json["entries"])


def test_a_part_is_a_study_of_its_own_that_uses_the_same_proofs(done: Place) -> None:
    part = ["--batch", "2", "--kv", "64"]
    missing = cli("export", *done.flags(), *part)
    assert missing.code == 1
    assert "must be as they were there" in missing.line
    proofs = done.verdicts()
    run = cli("run", *done.flags(), *part, "--json")
    assert run.code == 0, run.err
    assert (run.json["cells"], run.json["settled"], run.json["multiplicity"]) == (1, 1, 1)
    assert done.verdicts() == proofs
    assert done.count("study") == 2
    again = cli("export", *done.flags(), *part, "--json")
    assert again.code == 0, again.err
    assert (again.json["study"], again.json["cells"]) == (run.json["study"], 1)


def test_why_cells_are_open_is_said(done: Place) -> None:
    with contextlib.closing(sqlite3.connect(done.file)) as connection, connection:
        connection.execute(
            "UPDATE proof SET status = 'unproven', reason = 'infrastructure', detail = 'ImportError: no'||id"
            " WHERE check_name = 'reference' AND route = 'torch-splitkv' AND cell_id != ''"
        )
    text = cli("export", *done.flags())
    assert text.code == 0, text.err
    lines = text.out.splitlines()
    assert sum(line.startswith("1 cell unproven: torch-splitkv: infrastructure in ") for line in lines) == 3
    assert "ImportError: no" in text.out
    assert "1 cell unproven for other reasons" in lines
    listed = cli("export", *done.flags(), "--json").json["unproven"]
    assert [each["cells"] for each in listed] == [1] * 4


def test_reasons_that_differ_in_decimals_are_one() -> None:
    details = ["a: 1.10 under 1.2", "a: 1.15 under 1.2", "a: not timed yet", "a: stopped after 8", "a: 9"]

    def cell(detail: str) -> SimpleNamespace:
        return SimpleNamespace(decision=Decision(None, Reason.UNPROVEN, detail))

    found = unproven(cast(Any, SimpleNamespace(cells=[cell(detail) for detail in details])))
    assert found[0] == {"cells": 2, "detail": "a: ... under 1.2"}
    assert [each["detail"] for each in found[1:]] == details[2:]


def test_doctor(done: Place) -> None:
    result = cli("doctor", "--db", done.url, "--json")
    assert result.code == 0
    assert result.json["facts"] == collect("cpu", threads=1).to_dict()
    found = {row["what"]: row for row in result.json["findings"]}
    assert found["guarded memory"]["ok"] is True
    assert "1 studies" in found["database"]["detail"]
    text = cli("doctor", "--db", done.url)
    assert text.code == 0
    assert all(line.split()[0] in ("ok", "note", "missing") for line in text.out.splitlines())


def test_doctor_says_which_facts_are_not_known(done: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.hardware.cpu.torch_version", lambda: ("2.13.0", None))
    result = cli("doctor", "--db", done.url, "--json")
    assert result.code == 1
    found = {row["what"]: row for row in result.json["findings"]}
    assert found["software.torch_commit"]["ok"] is False
    assert "opens no table" in found["software.torch_commit"]["detail"]


def test_doctor_says_what_is_missing(place: Place) -> None:
    result = cli("doctor", "--gpu", "h200", "--db", "mysql://host/name", "--json")
    assert result.code == 1
    wrong = {row["what"] for row in result.json["findings"] if row["ok"] is False}
    assert wrong >= {"device", "database"}  # and the packages of a GPU that are not installed
    absent = cli("doctor", "--db", place.url, "--json")
    assert absent.code == 0
    assert not place.file.exists()


def test_prove_one_route(finished: tuple[Place, Result]) -> None:
    column = json.dumps(columns_of(finished[0])[0].to_dict())
    common = ["--column", column, "--kv-lens", "64,128"]
    result = cli("prove", "torch-splitkv", *common, "--check", "reference", "--check", "reference", "--json")
    assert result.code == 0, result.err
    assert [(row["check"], row["status"]) for row in result.json] == [("reference", "passed")]
    planted = cli("prove", "planted-full-mask", *common, "--check", "position_coded")
    assert planted.code == 1
    assert "wrong_output" in planted.out
    for flags, said in (
        (["nonsense", *common], "unknown route 'nonsense'"),
        (["planted-nonsense", *common], "planted-nonsense"),
        (["torch-sdpa", "--column", column, "--kv-lens", "0"], "--kv-lens '0'"),
        (["torch-sdpa", "--column", column, "--kv-lens", "64,129"], "1..128"),
        (["torch-sdpa", *common, "--check", "nonsense"], "'nonsense'"),
        (["torch-sdpa", *common, "--device", "tpu"], "tpu"),
        (["torch-sdpa", "--column", "[1]", "--kv-lens", "1"], "--column"),
        (["torch-sdpa", "--column", '{"q_len": 1}', "--kv-lens", "1"], "--column"),
    ):
        wrong = cli("prove", *flags)
        assert wrong.code == 2, wrong.err
        assert said in wrong.line


def test_json_holds_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"worst": float("nan"), "list": (float("inf"), 1.5)})
    assert json.loads(capsys.readouterr().out) == {"worst": "nan", "list": ["inf", 1.5]}
