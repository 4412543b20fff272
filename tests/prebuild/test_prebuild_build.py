"""The parent's side of a prebuild, with a stand-in for the child; and the child's build of one module."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.prebuild import build as build_module
from autotune.prebuild import manifest as manifests
from autotune.prebuild.alone import alone
from autotune.prebuild.build import modules_of, prebuild
from autotune.prebuild.child import Events, build_one, buildable
from autotune.prebuild.errors import PrebuildError
from autotune.prebuild.process import events
from autotune.prebuild.toolchain import Toolchain
from autotune.routes.flashinfer.ask import Asked, distinct

COLUMN = Column(Shape(8, 1, 128, 64), PROFILES["bf16"], 4, 2, 4096)
FACTS = Facts("cuda", {"compute_capability": "9.0"}, {})
LIBRARY = {"event": "library", "flashinfer": "0.7.2", "commit": "abc", "tvm_ffi": "0.1.11"}
BUILT = {
    "event": "built",
    "name": "xqa_x",
    "seconds": 1.0,
    "bytes": 3,
    "sha256": "00",
    "recipe": "r",
    "routes": ["xqa-decode"],
    "head_dims": [],
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``run(events, status=0)``: a prebuild whose child prints these events and ends with that status."""
    monkeypatch.setattr(build_module, "stub_driver", lambda toolchain, folder: folder)

    def start(events: list[dict[str, Any]], status: int = 0, complaint: str = "") -> Any:
        lines = "\n".join(json.dumps(event) for event in events)
        child = tmp_path / "python"
        child.write_text(
            f"#!/bin/sh\ncat > {tmp_path}/request.json\ncat <<'END'\n{lines}\nEND\n"
            f"echo '{complaint}' >&2\nexit {status}\n"
        )
        child.chmod(0o755)
        chain = Toolchain(tmp_path, "13.0", ())
        return prebuild(
            [COLUMN], FACTS, chain, tmp_path / "out", routes=["xqa-decode"], jobs=3, python=str(child)
        )

    return start


def test_events_become_an_outcome_and_a_manifest(run: Callable[..., Any], tmp_path: Path) -> None:
    asked = {"event": "asked", "modules": {"xqa_x": ["xqa-decode"], "fmha_gen": ["trtllm-gen-decode"]}}
    outcome = run([LIBRARY, asked, BUILT, {"event": "failed", "name": "fmha_gen", "reason": "no cubins"}])
    assert outcome.asked == asked["modules"] and outcome.built == ["xqa_x"]
    assert outcome.failed == {"fmha_gen": "no cubins"}
    manifest = manifests.read(tmp_path / "out")
    assert manifest is not None and manifest.modules["xqa_x"].routes == ("xqa-decode",)
    request = json.loads((tmp_path / "request.json").read_text())
    assert request["jobs"] == 3 and request["known"] == {} and request["cuda"] == "13.0"
    outcome = run([LIBRARY, asked, {"event": "present", "name": "xqa_x"}])
    assert outcome.present == ["xqa_x"]
    known = json.loads((tmp_path / "request.json").read_text())["known"]
    assert known == {"xqa_x": {"recipe": "r", "sha256": "00", "head_dims": []}}


def test_a_folder_of_another_version_is_refused(run: Callable[..., Any]) -> None:
    run([LIBRARY, BUILT])
    with pytest.raises(PrebuildError, match="give another folder") as raised:
        run([{**LIBRARY, "tvm_ffi": "0.1.15"}])
    assert "\n" not in str(raised.value)


def test_one_prebuild_a_folder(run: Callable[..., Any], tmp_path: Path) -> None:
    with alone(tmp_path / "out.work"), pytest.raises(PrebuildError, match="in use by another prebuild"):
        run([LIBRARY, BUILT])
    assert run([LIBRARY, BUILT]).built == ["xqa_x"]
    (tmp_path / "file").write_text("")
    with pytest.raises(PrebuildError, match="cannot be written"), alone(tmp_path / "file"):
        pass


def test_no_library_and_a_dead_child_are_one_line(run: Callable[..., Any]) -> None:
    with pytest.raises(PrebuildError, match="pip install flashinfer-python"):
        run([{"event": "missing", "reason": "FlashInfer cannot be imported: pip install flashinfer-python"}])
    with pytest.raises(PrebuildError, match=r"status 7: out of disk \(log: "):
        run([LIBRARY], status=7, complaint="out of disk")


def test_leaving_early_ends_the_child_and_its_compilers(tmp_path: Path) -> None:
    child = tmp_path / "python"
    child.write_text(
        f"#!/bin/sh\nsleep 300 & echo $! > {tmp_path}/compiler\necho '{json.dumps(LIBRARY)}'\nwait\n"
    )
    child.chmod(0o755)
    stream = events(str(child), {}, {}, tmp_path / "work")
    assert next(stream)[0] == "library"
    compiler = int((tmp_path / "compiler").read_text())
    stream.close()
    for _ in range(50):
        try:
            os.kill(compiler, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{compiler}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return  # dead, and only its new parent has not noticed yet
        time.sleep(0.1)
    os.kill(compiler, 9)
    pytest.fail("a compiler outlived the prebuild")


def test_only_what_changes_a_module_counts() -> None:
    columns = [
        Column(COLUMN.shape, COLUMN.dtypes, q_len, batch, context)
        for q_len in (1, 4)
        for batch in (1, 256)
        for context in (4096, 131072)
    ]
    found = distinct(columns)
    assert [(column.q_len, column.batch_size) for column in found] == [(1, 1), (4, 1)]


@dataclass
class Spec:
    """What the child needs of the library's ``JitSpec``."""

    folder: Path
    fail: str = ""
    sources: list[Path] = field(default_factory=list)

    @property
    def build_dir(self) -> Path:
        return self.folder

    @property
    def jit_library_path(self) -> Path:
        return self.folder / "m.so"

    def build(self) -> None:
        if self.fail:
            raise RuntimeError(self.fail)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.jit_library_path.write_bytes(b"\x7fELF")


def test_one_module_is_built_copied_and_reported(tmp_path: Path) -> None:
    stream = io.StringIO()
    asked = Asked(Spec(tmp_path / "objects"), {"fa2", "fa2-decode"}, (128,))
    build_one("m", asked, tmp_path / "out", "recipe", Events(stream))
    event = json.loads(stream.getvalue())
    path = manifests.library(tmp_path / "out", "m")
    assert event["event"] == "built" and event["sha256"] == manifests.digest(path) and event["bytes"] == 4
    assert event["routes"] == ["fa2", "fa2-decode"] and event["head_dims"] == [128]
    assert not (tmp_path / "objects").exists() and not list(path.parent.glob("*.partial"))


def test_a_module_that_fails_is_reported_in_one_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    spec = Spec(
        tmp_path / "objects", fail="ninja: ...\nx.cu(3): fatal error: curand.h: No such file\n1 rule."
    )
    build_one("m", Asked(spec), tmp_path / "out", "recipe", Events(stream))
    event = json.loads(stream.getvalue())
    assert event == {
        "event": "failed",
        "name": "m",
        "reason": "x.cu(3): fatal error: curand.h: No such file",
    }


def test_a_launcher_of_cubins_is_built_from_the_library_s_own_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Spec(tmp_path)
    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.attention"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    modules = types.ModuleType("flashinfer.jit.attention.modules")
    modules.gen_trtllm_gen_fmha_module = lambda: real  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, modules.__name__, modules)
    assert buildable(types.SimpleNamespace(name="fmha_gen")) is real
    assert buildable(real) is real


SITES = [site for site in os.environ.get("AUTOTUNE_FLASHINFER_SITE", "").split(os.pathsep) if site]


@pytest.mark.skipif(not SITES, reason="AUTOTUNE_FLASHINFER_SITE names no folder with FlashInfer")
@pytest.mark.parametrize("site", SITES or [""])
def test_the_library_names_its_modules(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([site, str(Path(torch.__file__).parents[1])]))
    asked = modules_of([COLUMN], FACTS, routes=["xqa-decode", "fmha-v2", "fa2-decode"], work=tmp_path)
    assert sorted(route for routes in asked.values() for route in routes) == [
        "fa2-decode",
        "fmha-v2",
        "xqa-decode",
    ]
    xqa = next(name for name, routes in asked.items() if routes == ["xqa-decode"])
    assert xqa.startswith("xqa_") and "spec_q_seq_len_4" in xqa and "head_group_ratio_8" in xqa


def test_the_child_runs_as_a_module() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import autotune.prebuild.child, sys; print('flashinfer' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "False"
