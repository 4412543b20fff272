"""Routes of somebody else's package, through the entry point, in a real run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.routes import registry
from tests.console import SINGLE, Place, Result, cli

DOC = Path(__file__).parents[2] / "docs" / "third-party-route.md"
PACKAGE = "example_attention_route"

# The template's class, twice wrong: its mask hides nothing, or it reads behind the page
# table, further than the padding that an engine could promise.
WRONG = """

class LooseMask(ExampleMatmul):
    name = "example-loose-mask"
    family = Family.CONTEXT

    def open(self, capacity, allocate):
        return LooseMaskSession(capacity, allocate)


class TableOverread(ExampleMatmul):
    name = "example-overread"

    def open(self, capacity, allocate):
        return OverreadSession(capacity, allocate)


class LooseMaskSession(ExampleSession):
    def prepare(self, step):
        super().prepare(step)
        self.q_len_seen = step.q_len

    def run(self, out):
        import dataclasses

        step, lens = self.step, self.lens
        for row, kv_len in enumerate(lens):
            one = dataclasses.replace(
                step,
                q=step.q[row * self.q_len : (row + 1) * self.q_len],
                page_table=step.page_table[row : row + 1],
                seq_lens=step.seq_lens[row : row + 1],
                host_kv_lens=(kv_len,),
            )
            # every query sees all tokens
            self.step, self.lens = one, (kv_len,)
            queries = []
            for i in range(self.q_len):
                self.step = dataclasses.replace(one, q=one.q[i : i + 1].expand(self.q_len, -1, -1))
                part = torch.empty_like(out[: self.q_len])
                super().run(part)
                queries.append(part[-1:])
            out[row * self.q_len : (row + 1) * self.q_len] = torch.cat(queries)
        self.step, self.lens = step, lens


class OverreadSession(ExampleSession):
    def run(self, out):
        import ctypes

        table = self.step.page_table
        ctypes.c_int32.from_address(table.data_ptr() + table.numel() * 4 + 1024).value
        super().run(out)
"""
ENTRIES = {
    "example-matmul": "ExampleMatmul",
    "example-loose-mask": "LooseMask",
    "example-overread": "TableOverread",
    "example-broken": "NoSuchClass",
}
ENGINE = """
schema: "autotune/engine/1"
name: "careless"
offers: ["host_kv_lens", "uniform_q_len"]
kv_layout: "fused-nhd"
page_size: 16
pad_value: 1
max_context: 4096
capture_sizes: [1, 4]
workspace_bytes: 0
third_party: true
architectures:
  cpu:
    mode: "eager"
    stock: "torch-sdpa"
    fallback: ["example-loose-mask"]
    deployable: ["example-loose-mask", "torch-sdpa", "torch-splitkv"]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The template of docs/third-party-route.md and its wrong siblings, as pip would lay them out."""
    folder = tmp_path_factory.mktemp("site")
    found = re.search(rf"^## `{PACKAGE}/__init__\.py`\n+```python\n(.*?)^```$", DOC.read_text(), re.M | re.S)
    assert found
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "__init__.py").write_text(found.group(1) + WRONG)
    info = folder / f"{PACKAGE}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example-attention-route\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("")
    lines = [f"{name} = {PACKAGE}:{target}\n" for name, target in ENTRIES.items()]
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{''.join(lines)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        registry.reload()
        yield
        sys.modules.pop(PACKAGE, None)
    registry.reload()


@pytest.fixture(scope="module")
def ran(
    installed: None, tmp_path_factory: pytest.TempPathFactory, finished: tuple[Place, Result]
) -> tuple[Place, Result]:
    """A run with them; our own routes' proofs of that column are there already."""
    place = Place(tmp_path_factory.mktemp("third_party")).copy_of(finished[0])
    return place, cli("run", *place.flags(SINGLE), "--json")


def rows(place: Place, route: str) -> set[tuple[str, str | None]]:
    """Status and kind of a route's proof rows."""
    return set(place.rows(f"SELECT status, kind FROM proof WHERE route = '{route}'"))


def test_a_correct_route_is_proven_and_raced(ran: tuple[Place, Result]) -> None:
    place, result = ran
    assert result.code == 0, result.err
    assert rows(place, "example-matmul") <= {("passed", None), ("not_applicable", None)}
    assert place.count("proof", "route = 'example-matmul' AND status = 'passed'") >= 10
    assert place.rows("SELECT rounds > 0 FROM timing WHERE route = 'example-matmul'") == [(1,)]


def test_wrong_ones_are_refuted_and_the_fallback_stands(ran: tuple[Place, Result]) -> None:
    place, result = ran
    kinds = {(item["route"], item["kind"]) for item in result.json["unsafe"]}
    assert kinds == {("example-loose-mask", "wrong_output"), ("example-overread", "illegal_access")}
    # whichever correct route wins, if any does
    assert result.json["reasons"] in ({"candidate_unsafe": 1}, {"proven_faster": 1})
    assert set(result.json["answers"]) <= {"fallback", "example-matmul", "torch-splitkv"}
    text = place.table.read_text()
    assert "illegal_access" in text
    assert "autotune prove example-overread" in text
    # refuted at the first check: it is not shown the others, and never timed
    assert place.count("timing", "route IN ('example-loose-mask', 'example-overread')") == 0


def test_our_own_proofs_are_not_run_again(ran: tuple[Place, Result], finished: tuple[Place, Result]) -> None:
    ours = {row for row in ran[0].verdicts() if row[2].startswith("torch-")}
    assert set(finished[0].verdicts()) <= ours
    # only the single cell's own launches are new
    assert len(ours - set(finished[0].verdicts())) == 2
    assert ran[0].count("study") == 2


def test_a_broken_entry_point_is_said_and_left_out(ran: tuple[Place, Result]) -> None:
    notes = [line for line in ran[1].err.splitlines() if line.startswith("autotune: ")]
    assert len(notes) == 1
    assert "'example-broken'" in notes[0]
    assert "NoSuchClass" in notes[0]


@pytest.mark.parametrize(
    ("route", "kind"), [("example-loose-mask", "wrong_output"), ("example-overread", "illegal_access")]
)
def test_the_stored_command_repeats_the_failure(ran: tuple[Place, Result], route: str, kind: str) -> None:
    command = next(item["repro"] for item in ran[1].json["unsafe"] if item["route"] == route)
    words = shlex.split(command)
    assert words[:3] == ["autotune", "prove", route]
    result = cli(*words[1:], "--json")
    assert result.code == 1
    (row,) = result.json
    assert (row["status"], row["kind"]) == ("failed", kind)


def test_no_safe_route_is_said_and_has_its_exit_code(ran: tuple[Place, Result], tmp_path: Path) -> None:
    engine = tmp_path / "careless.yaml"
    engine.write_text(ENGINE)
    place = Place(tmp_path).copy_of(ran[0])
    result = cli("run", *place.flags(SINGLE), "--engine", engine)
    assert result.code == 5, result.err
    assert "NO SAFE ROUTE in 1 cells, first: fallback example-loose-mask: wrong_output" in result.out
    again = cli("export", *place.flags(SINGLE), "--engine", engine, "--json")
    assert again.code == 5
    assert again.json["reasons"] == {"no_safe_route": 1}
    assert (place.out / "cpu.careless.yaml").exists()


def test_a_fallback_of_the_wrong_family_is_refused_before_any_work(installed: None, tmp_path: Path) -> None:
    engine = tmp_path / "careless.yaml"
    engine.write_text(
        ENGINE.replace("example-loose-mask", "torch-splitkv").replace(', "torch-splitkv"]', "]")
    )
    place = Place(tmp_path)
    result = cli("run", *place.flags(SINGLE), "--engine", engine)
    assert result.code == 2
    assert result.err.splitlines()[-1] == (
        "autotune: engine careless: fallback torch-splitkv is a decode route; a fallback is a context route"
    )
    assert not place.file.exists()
