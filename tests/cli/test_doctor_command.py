"""``autotune doctor --gpu``: what a run over a space lacks of kernels, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.main import main
from autotune.domain.cell import Column
from autotune.prebuild import manifest as manifests
from autotune.prebuild.manifest import Manifest, Module
from autotune.prebuild.toolchain import Toolchain
from autotune.routes.flashinfer.library import LibraryError

Findings = dict[str, list[dict[str, Any]]]


class Answers:
    """Stands for the process that names modules: one a route."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.error: LibraryError | None = None

    def modules(self, route: str, column: Column) -> Mapping[str, str | None]:
        if self.error is not None:
            raise self.error
        path = manifests.library(self.here, route)
        return {route: str(path) if path.is_file() else None}


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """A FlashInfer 0.7.2 without headers and modules, and no compiler."""
    package = tmp_path / "site" / "flashinfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this process must not import it')\n")
    (package / "_build_meta.py").write_text('__version__ = "0.7.2"\n')
    monkeypatch.syspath_prepend(str(package.parent))
    found = Answers(package / "data" / "aot")
    monkeypatch.setattr("autotune.prebuild.wanted.library", lambda arch: found)
    monkeypatch.setattr(
        "autotune.prebuild.toolchain.examine", lambda: (None, ["ninja not found: pip install ninja"])
    )
    return found


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Findings]:
    """``doctor("--engine", "sglang")`` for an H200: findings by what they are about; always exit 1 here."""

    def ask(*more: str, gpu: str = "h200") -> Findings:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--gpu", gpu, "--db", f"sqlite:///{tmp_path}/no.db", "--json", *more])
        assert ended.value.code == 1  # this machine is no H200
        found: Findings = {}
        for item in json.loads(capsys.readouterr().out)["findings"]:
            found.setdefault(item["what"], []).append(item)
        return found

    return ask


def build(folder: Path, *names: str) -> Manifest:
    manifest = Manifest("0.7.2", "", "", "13.0", "9.0")
    for name in names:
        path = manifests.library(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
        manifest.modules[name] = Module(name, manifests.digest(path), len(name), 1.0, "r")
    manifest.write(folder)
    return manifest


def test_modules_that_are_not_built_are_named_with_the_commands(
    answers: Answers, doctor: Callable[..., Findings]
) -> None:
    found = doctor("--engine", "sglang", "--routes", "fa2,fmha-v2")
    (kernels,) = found["kernels"]
    assert kernels["ok"] is False and "3 of 3 modules of this space are not built" in kernels["detail"]
    names = [item["module"] for item in kernels["missing"]]
    assert names == ["fa2", "fmha-v2", "xqa-decode"]  # the last is the self-test's
    assert kernels["commands"][0] == "autotune prebuild --gpu h200 --engine sglang --out DIR"
    assert kernels["commands"][1].startswith("autotune prebuild --out DIR --into ")
    assert [item["ok"] for item in found["compiler"]] == [False, False]
    assert "pip install ninja" in found["compiler"][0]["detail"]
    assert "without data/include" in found["compiler"][1]["detail"]
    assert "kernel manifest" not in found


def test_what_is_built_is_checked(answers: Answers, doctor: Callable[..., Findings]) -> None:
    manifest = build(answers.here, "fa2", "xqa-decode")
    found = doctor("--routes", "fa2")
    assert (found["kernels"][0]["ok"], found["kernels"][0]["missing"]) == (True, [])
    assert found["kernel manifest"][0]["ok"] is True
    assert {item["ok"] for item in found["compiler"]} == {None}  # nothing is left to compile
    manifests.library(answers.here, "fa2").write_bytes(b"damaged")
    (item,) = doctor("--routes", "fa2")["kernel manifest"]
    assert item["ok"] is False and "not the file that was built" in item["detail"]
    assert item["changed"] == ["fa2"] and "--into" in item["detail"]
    replace(manifest, compute_capability="10.0").write(answers.here)
    (item,) = doctor("--routes", "fa2")["kernel manifest"]
    assert item["ok"] is False and "built for compute capability 10.0" in item["detail"]
    (answers.here / "manifest.json").write_text("?")
    assert doctor("--routes", "fa2")["kernel manifest"][0]["ok"] is False
    (answers.here / "manifest.json").unlink()
    assert doctor("--routes", "fa2")["kernel manifest"][0]["ok"] is None


def test_a_module_without_a_head_size_of_the_space_is_named(
    answers: Answers, doctor: Callable[..., Findings]
) -> None:
    manifest = build(answers.here, "fmha-v2", "xqa-decode")
    assert doctor("--engine", "sglang", "--routes", "fmha-v2")["kernel manifest"][0]["ok"] is True
    manifest.modules["fmha-v2"] = replace(manifest.modules["fmha-v2"], head_dims=(256,))
    manifest.write(answers.here)
    (item,) = doctor("--engine", "sglang", "--routes", "fmha-v2")["kernel manifest"]
    assert item["ok"] is False and item["lacking"] == ["fmha-v2"]
    assert "fmha-v2: built for head sizes 256, and 128 is asked for" in item["detail"]
    assert "autotune prebuild --gpu h200 --engine sglang --out DIR" in item["detail"]


def test_a_compiler_that_is_here(
    answers: Answers, doctor: Callable[..., Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("include", "cutlass"):
        (answers.here.parent / name).mkdir(parents=True)
    chain = Toolchain(Path("/cuda"), "13.0", ())
    monkeypatch.setattr("autotune.prebuild.toolchain.examine", lambda: (chain, []))
    (item,) = doctor("--routes", "fa2")["compiler"]
    assert item["ok"] is True and "CUDA 13.0 at /cuda" in item["detail"]


def test_precompiled_kernels(answers: Answers, doctor: Callable[..., Findings]) -> None:
    (item,) = doctor("--routes", "trtllm-gen-decode", gpu="b200")["cubins"]
    assert item["ok"] is False and "pip install flashinfer-cubin==0.7.2" in item["detail"]
    assert "cubins" not in doctor("--routes", "fa2")


def test_a_library_that_cannot_be_imported_or_refuses(
    answers: Answers, doctor: Callable[..., Findings]
) -> None:
    answers.error = LibraryError("FlashInfer cannot be imported (no tvm_ffi)", unusable=True)
    (item,) = doctor()["kernels"]
    assert (item["ok"], item["detail"]) == (False, "FlashInfer cannot be imported (no tvm_ffi)")
    answers.error = LibraryError("FlashInfer refuses it")
    found = doctor("--routes", "fa2")["kernels"]
    assert {item["detail"] for item in found[1:]} == {"FlashInfer refuses it"}


def test_without_the_library_its_packages_are_missing(
    doctor: Callable[..., Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.hardware.flashinfer.package_folder", lambda name: None)
    monkeypatch.setattr("autotune.prebuild.wanted.wanted", None)  # it is not asked: that would take seconds
    found = doctor()
    assert found["flashinfer-python"][0]["ok"] is False
    assert "kernels" not in found and "compiler" not in found


def test_a_cpu_lacks_no_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--gpu", "cpu", "--db", f"sqlite:///{tmp_path}/no.db", "--json"])
    found = {item["what"]: item["ok"] for item in json.loads(capsys.readouterr().out)["findings"]}
    assert "kernels" not in found and found["cuda-bindings"] is None
