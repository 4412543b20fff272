"""``autotune prebuild``: what it refuses, in one line and with which exit code; installing built modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.cli.main import main
from autotune.prebuild import manifest as manifests
from autotune.prebuild.manifest import Manifest, Module


def run(*arguments: str) -> int:
    """The command's exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["prebuild", *arguments])
    return int(ended.value.code or 0)


def test_a_cpu_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--gpu", "cpu") == 2
    assert "needs no prebuilt kernels" in capsys.readouterr().err


def test_an_unknown_route_is_named_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--gpu", "h200", "--route", "xqa") == 2
    said = capsys.readouterr().err
    assert "unknown route 'xqa'" in said and "xqa-decode" in said and said.count("\n") == 1


def test_a_missing_compiler_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert run("--gpu", "h200", "--out", str(tmp_path / "out")) == 1
    said = capsys.readouterr().err
    assert "nvcc does not run" in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_into_installs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, package = tmp_path / "kernels", tmp_path / "flashinfer"
    package.mkdir()
    (package / "_build_meta.py").write_text('__version__ = "0.7.2"\n')
    assert run("--out", str(folder), "--into", str(package)) == 1
    assert "no manifest.json" in capsys.readouterr().err
    path = manifests.library(folder, "xqa_x")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"module")
    # built against no particular runtime: whatever is installed will do
    manifest = Manifest("0.7.2", "abc", "", "13.0", "9.0")
    manifest.modules["xqa_x"] = Module("xqa_x", manifests.digest(path), 6, 1.0, "recipe")
    manifest.write(folder)
    assert run("--out", str(folder), "--into", str(package), "--json") == 0
    assert json.loads(capsys.readouterr().out)["installed"] == ["xqa_x"]
    assert (package / "data" / "aot" / "xqa_x" / "xqa_x.so").read_bytes() == b"module"


def test_merge_makes_one_folder_and_its_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        path = manifests.library(tmp_path / name, f"xqa_{name}")
        path.parent.mkdir(parents=True)
        path.write_bytes(name.encode())
        manifest = Manifest("0.7.2", "abc", "", "13.0", "9.0")
        manifest.modules[f"xqa_{name}"] = Module(f"xqa_{name}", manifests.digest(path), 3, 1.0, "recipe")
        manifest.write(tmp_path / name)
    sources = ["--merge", str(tmp_path / "one"), "--merge", str(tmp_path / "two")]
    assert run(*sources, "--out", str(tmp_path / "both"), "--json") == 0
    assert list(json.loads(capsys.readouterr().out)["merged"].values()) == [["xqa_one"], ["xqa_two"]]
    assert sorted(manifests.require_whole(tmp_path / "both").modules) == ["xqa_one", "xqa_two"]
    manifests.library(tmp_path / "one", "xqa_one").write_bytes(b"damaged")
    assert run(*sources, "--out", str(tmp_path / "again")) == 1
    said = capsys.readouterr().err
    assert "xqa_one: " in said and "not the file that was built" in said and said.count("\n") == 1
