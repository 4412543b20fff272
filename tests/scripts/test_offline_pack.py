"""Pack a small FlashInfer, wheel and kernel here; unpack them elsewhere and run autotune from there."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from autotune.prebuild.manifest import Manifest, Module, digest, require_whole

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "scripts" / "offline" / "pack.py"
SCRIPT = ROOT / "scripts" / "offline" / "unpack_and_run.sh"
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def _script(name: str) -> Any:
    """A module of the scripts' folder, which is no package."""
    spec = importlib.util.spec_from_file_location(name, PACK.with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


flashinfer_files = _script("flashinfer_files")


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**clean, **env},
        cwd="/",
    )


def wheel(folder: Path, name: str, version: str = "1.0") -> Path:
    """A wheel of one module that says where it lies."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "WHERE = __file__\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def kernels(folder: Path, *names: str) -> Path:
    """A folder of prebuilt kernels."""
    manifest = Manifest("9.9", "abc", "1.0", "13.0", "9.0")
    for name in names:
        library = folder / name / f"{name}.so"
        library.parent.mkdir(parents=True)
        library.write_bytes(name.encode())
        manifest.modules[name] = Module(name, digest(library), len(name), 1.0, "r")
    manifest.write(folder)
    return folder


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder of wheels, a FlashInfer wheel with parts to leave out, and a folder of prebuilt kernels."""
    for name in ("carried", "apache_tvm_ffi"):
        wheel(tmp_path / "wheels", name)
    with zipfile.ZipFile(tmp_path / "flashinfer_python-9.9-py3-none-any.whl", "w") as file:
        file.writestr("flashinfer/__init__.py", "")
        file.writestr("flashinfer/_build_meta.py", '__version__ = "9.9"\n__git_commit__ = "abc"\n')
        file.writestr("flashinfer/data/csrc/small.jinja", "x")
        file.writestr("flashinfer/data/csrc/large.cu", "x" * 200_000)
        file.writestr("flashinfer/data/csrc/xqa/mha.cu", "x" * 200_000)
        file.writestr("flashinfer/data/csrc/other/deep.cu", "x")
        file.writestr("flashinfer/data/include/header.cuh", "x")
        file.writestr("flashinfer/data/aot/old/old.so", "x")
        file.writestr("flashinfer_python-9.9.dist-info/METADATA", "Name: flashinfer-python\nVersion: 9.9\n")
        file.writestr("flashinfer_python-9.9.dist-info/RECORD", "flashinfer/data/include/header.cuh,,\n")
    kernels(tmp_path / "kernels", "xqa_some")
    return tmp_path


def packed(inputs: Path, *more: str | Path, python: str = HERE) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [sys.executable, PACK, "--into", inputs / "out", "--python", python]
    command += ["--machine", platform.machine(), "--wheels", inputs / "wheels"]
    command += ["--flashinfer", inputs / "flashinfer_python-9.9-py3-none-any.whl"]
    return run(*command, "--kernels", inputs / "kernels", *more)


def unpacked(inputs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    into = ("--into", inputs / "elsewhere", "--python", sys.executable)
    return run("sh", inputs / "out" / "unpack_and_run.sh", *into, *arguments)


def test_what_was_packed_runs_elsewhere(inputs: Path) -> None:
    (inputs / "study.db").write_bytes(b"a study")
    wheel(inputs / "wheels", "typer", "0.0")  # of the bare list: a host has one, whatever version
    wheel(inputs / "wheels", "SQLAlchemy", version("sqlalchemy"))  # the very same is here
    wheel(inputs / "wheels", "mako", "0.0")
    done = packed(
        inputs, "--database", inputs / "study.db", "--kernels", kernels(inputs / "more", "fa2_more")
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(inputs / "out" / "pack.tar.xz") as tar:
        names = set(tar.getnames())
        about = json.load(tar.extractfile("pack.json") or io.BytesIO())
    assert {
        "flashinfer/flashinfer/data/csrc/small.jinja",
        "flashinfer/flashinfer/data/csrc/xqa/mha.cu",
    } <= names
    left_out = ("large.cu", "header", "deep", "old.so", "RECORD", "tuned_configs/evidence")
    assert not [name for name in names if any(part in name for part in left_out)]
    assert "project/autotune/cli/main.py" in names
    assert (about["flashinfer"], about["kernels"]["modules"]) == ("9.9", 2)

    shown = unpacked(inputs, "--", "--version")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()
    site = inputs / "elsewhere" / "site"
    aot = site / "flashinfer" / "data" / "aot"
    assert (aot / "xqa_some" / "xqa_some.so").read_bytes() == b"xqa_some"
    assert sorted(require_whole(aot).modules) == ["fa2_more", "xqa_some"]
    assert (inputs / "elsewhere" / "autotune.db").read_bytes() == b"a study"
    assert "2 prebuilt kernels are in place, for FlashInfer 9.9" in shown.stderr
    assert f"the host's own: SQLAlchemy {version('sqlalchemy')}, typer {version('typer')}" in shown.stderr
    found = sorted(path.name for path in site.glob("*.py"))
    assert found == ["apache_tvm_ffi.py", "carried.py", "mako.py"]  # another version of mako: ours is first

    # a second call unpacks nothing: what the host has written stays
    (inputs / "elsewhere" / "autotune.db").write_bytes(b"gone on")
    code = "import autotune, carried; from importlib import metadata as m\n"
    code += "from autotune.hardware.flashinfer import flashinfer_facts as facts\n"
    code += "print(autotune.__file__, carried.WHERE, m.version('flashinfer-python'), *facts().values())"
    again = unpacked(inputs, "--python-arguments", "-c", code)
    assert again.returncode == 0, again.stderr
    where = again.stdout.split()
    assert where[0] == str(inputs / "elsewhere/project/autotune/__init__.py")
    assert where[1:] == [str(site / "carried.py"), "9.9", "9.9", "abc", "None"]
    assert (inputs / "elsewhere" / "autotune.db").read_bytes() == b"gone on"


def test_a_host_that_the_pack_is_not_for_is_told_in_one_line(inputs: Path) -> None:
    assert packed(inputs, python="3.1").returncode == 0
    done = unpacked(inputs, "plan")
    assert done.returncode == 1
    assert f"the pack is for Python 3.1, and {sys.executable} is {HERE}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (inputs / "elsewhere" / "unpacked").exists()  # the next call tries again


def test_a_pack_that_was_cut_off_is_told_in_one_line(inputs: Path) -> None:
    (inputs / "out").mkdir()
    (inputs / "out" / "pack.tar.xz").write_bytes(b"\xfd7zXZ\x00 cut off")
    (inputs / "out" / "unpack_and_run.sh").write_bytes(SCRIPT.read_bytes())
    done = unpacked(inputs, "plan")
    assert done.returncode != 0
    assert "cannot be unpacked" in done.stderr and "copy it again" in done.stderr
    assert "Traceback" not in done.stderr


def test_kernels_that_the_runtime_cannot_load_are_refused_on_the_host(inputs: Path) -> None:
    manifest = inputs / "kernels" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"tvm_ffi": "1.0"', '"tvm_ffi": "2.0"'))
    assert packed(inputs).returncode == 0
    done = unpacked(inputs, "plan")
    assert done.returncode == 1
    assert "needs apache-tvm-ffi 2.0 or later, and 1.0 is installed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (inputs / "elsewhere" / "unpacked").exists()


def test_flashinfer_may_come_from_a_folder_or_a_tar(inputs: Path) -> None:
    site, name = inputs / "site", "flashinfer_python-9.9-py3-none-any.whl"
    with zipfile.ZipFile(inputs / name) as file:
        file.extractall(site)
        wheel_names = {entry for entry in file.namelist() if flashinfer_files.wanted(entry, 1)}
    (site / "flashinfer" / "__pycache__").mkdir()
    (site / "flashinfer" / "__pycache__" / "x.py").write_text("")
    from_folder = {name for name, _ in flashinfer_files.files(site)}
    assert from_folder == wheel_names - {"flashinfer/data/csrc/large.cu"}
    with tarfile.open(inputs / "tar", "w") as tar:
        for entry in site.iterdir():
            tar.add(entry, entry.name)
    assert {name for name, _ in flashinfer_files.files(inputs / "tar")} == from_folder


def test_what_cannot_be_packed_is_one_clear_line(inputs: Path) -> None:
    done = packed(inputs, "--limit-mb", "0.001")
    assert done.returncode == 1
    assert "more than --limit-mb 0.001" in done.stderr
    assert not (inputs / "out" / "pack.tar.xz").exists()
    (inputs / "wheels" / "carried-2.0-py3-none-any.whl").write_bytes(b"")
    done = packed(inputs)
    assert done.returncode == 2
    assert "keep one version of each package" in done.stderr
    (inputs / "wheels" / "carried-2.0-py3-none-any.whl").unlink()
    manifest = inputs / "kernels" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"9.9"', '"9.8"'))
    assert "built for FlashInfer 9.8, and --flashinfer is 9.9" in packed(inputs).stderr
    manifest.write_text(text)
    (inputs / "kernels" / "xqa_some" / "xqa_some.so").write_bytes(b"damaged")
    assert "xqa_some.so is not the file that was built" in packed(inputs).stderr
    manifest.unlink()
    assert "has no manifest.json" in packed(inputs).stderr
    (inputs / "flashinfer_python-9.9-py3-none-any.whl").write_bytes(b"?")
    assert "is neither a wheel, a folder nor a tar" in packed(inputs).stderr
    done = run("sh", SCRIPT)
    assert (done.returncode, "no pack at" in done.stderr) == (2, True)
