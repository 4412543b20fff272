"""``benchmarks/corners.py``: what it looks at, and that a row is kept as soon as it is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from autotune.checks import registry as checks
from autotune.checks.catalogue import VERSIONS
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.domain.verdict import CheckResult, CheckStatus, FailureKind
from autotune.prebuild import install, manifest
from autotune.routes import registry as routes
from autotune.routes.flashinfer import installed, library
from benchmarks import corners
from benchmarks.corner_list import CORNERS, Corner
from benchmarks.corner_rows import NOT_HERE, Found, Report, earlier, unfinished, wanting
from benchmarks.corners import QUICK, absent, hunt, main, proving, task_of

H200 = Facts("cuda", {"compute_capability": "9.0", "memory_gib": 140}, {"flashinfer": "0.7.2"})
CPU = Facts("cpu", {}, {})
SMALL = Corner("small", "quick", Column(Shape(4, 2, 64, 16), PROFILES["bf16"], 3, 2, 64))
FP8 = Corner("fp8", "torch has none", Column(Shape(4, 2, 64, 16), PROFILES["fp8"], 3, 2, 64))


def test_the_corners_are_those_that_upstream_leaves_out() -> None:
    columns = [corner.column for corner in CORNERS]
    assert len({corner.name for corner in CORNERS}) == len(CORNERS) == len({c.id for c in columns}) >= 24
    shapes = [column.shape for column in columns]
    assert {16, 32, 128} <= {shape.page_size for shape in shapes}
    assert {5, 6, 7, 12} <= {shape.group for shape in shapes}
    assert {6, 7, 8, 12, 16} <= {column.q_len for column in columns}
    assert any(shape.head_dim == 64 for shape in shapes)
    assert any(shape.sinks for shape in shapes) and any(shape.window_left >= 0 for shape in shapes)
    assert any(column.q_len == 1 and column.max_context >= 65536 for column in columns)
    fp8 = {c.q_len * c.shape.group for c in columns if c.dtypes == PROFILES["fp8"] and c.q_len > 1}
    assert 32 in fp8 and min(fp8) < 32 < 33 <= min(n for n in fp8 if n > 32) <= 36
    # each has a kernel on the device that they are for
    for corner in CORNERS:
        assert any(r.supports(corner.column, H200) is None for r in routes.routes("cuda").values()), corner


def test_a_quick_look_is_part_of_a_proof() -> None:
    every = proving(CORNERS[0], routes.get("xqa-decode"), H200, checks.names(), 1)
    quick = proving(CORNERS[0], routes.get("xqa-decode"), H200, QUICK, 1)
    assert [job.check for job in quick.jobs] == list(QUICK)
    assert all(job in every.jobs for job in quick.jobs) and len(every.jobs) == len(checks.names()) - 1
    assert len({job.seed for job in every.jobs}) == len(every.jobs)
    assert every.jobs[0].arena_kind == "cuda_vmm" and every.jobs[0].kv_lens == (512, 4096)
    assert task_of(every).nbytes > 2 * 2**31  # the far pool


def test_rows_are_written_as_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    kept: list[list[dict[str, Any]]] = []

    class Watched(Report):
        def add(self, found: Found) -> None:
            super().add(found)
            kept.append([json.loads(line) for line in path.read_text().splitlines()])

    chosen = [routes.get("torch-splitkv"), routes.get("torch-sdpa")]
    with path.open("a") as stream:
        report = Watched(stream)
        hunt([FP8, SMALL], chosen, CPU, report, checks=QUICK[:3], seconds=300.0, provers=1, seed=1)
    assert [len(rows) for rows in kept] == [1, 2]
    rows = {(row["corner"], row["route"]): row for row in kept[-1]}
    safe = rows["small", "torch-splitkv"]
    assert (safe["verdict"], safe["checks"], safe["kind"], safe["repro"]) == ("safe", 3, "", "")
    assert 0.0 < safe["worst_error"] < safe["bound"] and safe["launches"] > 10
    assert Column.from_dict(safe["column"]) == SMALL.column
    report.summary(1.0)
    said = capsys.readouterr().out
    assert "2 pairs of a corner and a route that does not support it are left out" in said
    assert said.rstrip().endswith("\n1 corners tried, 2 rows in 1 s: 2 safe")
    assert "| small: 4/2/64 page 16 bf16/bf16 q_len 3 batch 2 | torch-sdpa | safe |" in said


def test_what_time_does_not_allow_is_said_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(None)
    hunt([SMALL], [routes.get("torch-sdpa")], CPU, report, checks=QUICK, seconds=0.0, provers=1, seed=1)
    assert report.counts == {"unproven": 1} and not report.corners
    assert "| unproven |  | reference |  | budget |" in capsys.readouterr().out


def test_a_failure_is_told_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    found = proving(SMALL, routes.get("torch-sdpa"), CPU, QUICK, 1)
    found.rows += [
        CheckResult("reference", 2, CheckStatus.PASSED, 1, launches=4, worst_error=0.002),
        CheckResult(
            "position_coded", 2, CheckStatus.FAILED, 1, kind=FailureKind.WRONG_OUTPUT, detail="row 3 | head 1"
        ),
    ]
    assert found.done
    report = Report(None)
    report.add(found.found(CPU))
    report.summary(2.0)
    said = capsys.readouterr().out
    assert "| unsafe | wrong_output | position_coded | 0.002/0.0" in said and "row 3 / head 1 |" in said
    assert "  autotune prove torch-sdpa --column" in said and "--check position_coded" in said


def test_what_is_not_prebuilt_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    column, module = CORNERS[0].column, "trtllm_fmha_v2_x"

    class Known:
        def modules(self, route: str, column: Column) -> dict[str, str | None]:
            return {module: __file__ if route == "fmha-v2" else None}

    monkeypatch.setattr(installed, "package", lambda facts: tmp_path)
    monkeypatch.setattr(installed, "lacking", lambda where: "no nvcc")
    monkeypatch.setattr(installed, "library", lambda arch: Known())
    monkeypatch.setattr(library, "library", lambda arch: Known())
    monkeypatch.setattr(install, "aot_folder", lambda package: package)
    assert f"module {module} is not built" in str(absent(routes.get("xqa-decode"), column, H200))
    fmha = routes.get("fmha-v2")
    assert absent(fmha, column, H200) is None  # no manifest: nothing is known of its head sizes
    built = manifest.Manifest("0.7.2", "", "", "13.0", "9.0")
    built.modules[module] = manifest.Module(module, "", 1, 1.0, "", head_dims=(64, 256))
    built.write(tmp_path)
    assert absent(fmha, column, H200) == f"module {module} was built for head sizes 64, 256 only"
    assert absent(fmha, next(c.column for c in CORNERS if c.name == "q7-dim256"), H200) is None
    report = Report(None)
    hunt([CORNERS[0]], [fmha], H200, report, checks=QUICK, seconds=9.0, provers=1, seed=1)
    assert report.counts == {"not here": 1}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "page17"], "no corner is called 'page17'; there are fp8-at-32"),
        (["--device", "cpu", "--routes", "fa2"], "no route is called 'fa2'; there are torch-sdpa"),
        (["--device", "tpu"], "device must be cpu, cuda or cuda:N"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


def test_columns_are_listed_as_prebuild_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from autotune.prebuild.columns import read

    assert main(["--list-columns", "--only", "group5,page16"]) == 0
    path = tmp_path / "columns.json"
    path.write_text(capsys.readouterr().out)
    wanted = {corner.name: corner.column for corner in CORNERS}
    assert read(path) == [wanted["group5"], wanted["page16"]]


def test_modules_are_named_by_the_library(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from autotune.prebuild import build

    def modules_of(columns: list[Column], facts: Facts, **more: Any) -> dict[str, list[str]]:
        assert [column.shape.group for column in columns] == [7] and more["routes"] == ["xqa-decode"]
        return {f"xqa_{facts.hardware['compute_capability']}": ["xqa-decode"]}

    monkeypatch.setattr(build, "modules_of", modules_of)
    assert main(["--list-modules", "--only", "group7", "--routes", "xqa-decode"]) == 0
    assert capsys.readouterr().out == "xqa_9.0  [xqa-decode]\n"


def test_a_run_goes_on_where_its_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real launches the first time; the second looks at what was left, and at nothing else."""
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(corners, "CORNERS", (SMALL,))
    monkeypatch.setattr(corners, "QUICK", QUICK[:2])
    asked = ["--device", "cpu", "--out", str(path), "--quick"]
    assert main([*asked, "--routes", "torch-sdpa", "--seconds", "300"]) == 0
    assert main([*asked, "--seconds", "0"]) == 0
    said = capsys.readouterr().out
    assert said.count("| torch-sdpa | safe |") == 1 and "going on: 1 rows of earlier runs stand" in said
    assert "0 corners complete, 1 open: small (1); the same command" in said
    assert re.search(r"1 corners tried, 2 rows in \d+ s: 1 safe, 1 unproven\n$", said)
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["route"], row["verdict"]) for row in kept] == [
        ("torch-sdpa", "safe"),
        ("torch-splitkv", "unproven"),
    ]
    # another look is another matter, and so is another machine
    assert main([*asked[:-1], "--seconds", "0"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(corners, "machine", lambda facts: "another")
        assert main([*asked, "--seconds", "0"]) == 0
    monkeypatch.setitem(VERSIONS, "reference", 99)  # stricter than what the rows have passed
    assert main([*asked, "--seconds", "0"]) == 0
    assert "going on" not in capsys.readouterr().out


def row(corner: Corner, route: str, verdict: str, detail: str = "") -> Found:
    return Found(corner, route, verdict, detail=detail, limits=("far",), checks=3)


def test_earlier_rows(tmp_path: Path) -> None:
    path, marks = tmp_path / "rows.jsonl", {"proof": "reference:2", "on": "H200 / 0.7.2"}
    moved = Corner("fp8", "", SMALL.column)
    with path.open("w") as stream:
        report = Report(stream, marks)
        report.add(row(SMALL, "fa2", "unproven", "budget"))
        report.add(row(SMALL, "fa2", "safe"))
        report.add(row(moved, "fa2", "safe"))  # that name has another column now
        stream.write(json.dumps(row(SMALL, "fa3", "safe").to_dict()) + "\n")  # nobody says of what
        for other in ({"on": "B200"}, {"proof": "reference:1"}):
            stream.write(json.dumps({**row(SMALL, "xqa", "safe").to_dict(), **marks, **other}) + "\n")
        stream.write('[1]\n{"corner": "small"}\n' + json.dumps(row(SMALL, "fmha-v2", "safe").to_dict())[:90])
    assert earlier(path, [SMALL, FP8], marks) == [row(SMALL, "fa2", "safe")]
    with corners._appending(path) as stream:
        Report(stream, marks).add(row(SMALL, "fmha-v2", "refused"))
    assert earlier(path, [SMALL], marks)[-1] == row(SMALL, "fmha-v2", "refused")


def test_a_row_that_the_file_has_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    absent_row = row(SMALL, "fa3", NOT_HERE, "module m is not built")
    for _ in range(2):
        before = earlier(path, [SMALL], {}) if path.exists() else []
        with path.open("a") as stream:
            report = Report(stream, {}, before)
            assert not report.stands(SMALL, "fa3")  # it may be here by now
            report.add(absent_row)
    assert len(path.read_text().splitlines()) == 1


def test_missing_modules_are_counted_with_what_builds_them() -> None:
    remedy = (
        "autotune prebuild --gpu h200 --out DIR where there is a compiler, "
        "then autotune prebuild --out DIR --into /at/flashinfer here"
    )
    rows = [
        *(
            row(SMALL, f"r{i}", NOT_HERE, f"module m1 is not built and cannot be (x): {remedy}")
            for i in (1, 2)
        ),
        row(FP8, "r1", NOT_HERE, "module m2 was built for head sizes 128 only"),
        row(FP8, "r2", "safe"),
    ]
    counted, commands = wanting(rows)
    assert counted == "not here, 3 rows for want of 2 modules: 2 x m1, 1 x m2"
    assert "corners.py --list-columns > columns.json, then autotune prebuild --gpu h200 --columns" in commands
    assert commands.endswith("then autotune prebuild --out DIR --into /at/flashinfer here")
    assert "--gpu PROFILE --columns columns.json --out DIR" in wanting(rows[2:])[1]
    assert wanting(rows[3:]) == unfinished(rows) == []


def test_an_out_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path / "none" / "rows.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("corners: --out ")
