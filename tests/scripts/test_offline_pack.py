"""Pack a small FlashInfer, wheel and kernel here; unpack them elsewhere and run autotune from there."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from autotune.prebuild.manifest import Manifest, Module, digest

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "scripts" / "offline" / "pack.py"


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


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder of wheels, a FlashInfer wheel with parts to leave out, and a folder of prebuilt kernels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("carried", "apache_tvm_ffi"):
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{name}.py", "WHERE = __file__\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    with zipfile.ZipFile(tmp_path / "flashinfer_python-9.9-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flashinfer/__init__.py", "")
        wheel.writestr("flashinfer/_build_meta.py", '__version__ = "9.9"\n')
        wheel.writestr("flashinfer/data/csrc/small.jinja", "x")
        wheel.writestr("flashinfer/data/csrc/large.cu", "x" * 200_000)
        wheel.writestr("flashinfer/data/csrc/xqa/mha.cu", "x" * 200_000)
        wheel.writestr("flashinfer/data/csrc/other/deep.cu", "x")
        wheel.writestr("flashinfer/data/include/header.cuh", "x")
        wheel.writestr("flashinfer_python-9.9.dist-info/METADATA", "Name: flashinfer-python\nVersion: 9.9\n")
    library = tmp_path / "kernels" / "xqa_some" / "xqa_some.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF kernel")
    Manifest(
        flashinfer="9.9",
        flashinfer_commit="abc",
        tvm_ffi="1.0",
        cuda="13.0",
        compute_capability="9.0",
        modules={"xqa_some": Module("xqa_some", digest(library), 11, 1.0, "r")},
    ).write(tmp_path / "kernels")
    return tmp_path


def packed(inputs: Path, *more: str | Path) -> subprocess.CompletedProcess[str]:
    wheel = inputs / "flashinfer_python-9.9-py3-none-any.whl"
    into = (sys.executable, PACK, "--into", inputs / "out")
    return run(
        *into, "--wheels", inputs / "wheels", "--flashinfer", wheel, "--kernels", inputs / "kernels", *more
    )


def test_what_was_packed_runs_elsewhere(inputs: Path) -> None:
    (inputs / "study.db").write_bytes(b"a study")
    done = packed(inputs, "--database", inputs / "study.db")
    assert done.returncode == 0, done.stderr
    with tarfile.open(inputs / "out" / "pack.tar.xz") as tar:
        names = set(tar.getnames())
    assert {
        "flashinfer/flashinfer/data/csrc/small.jinja",
        "flashinfer/flashinfer/data/csrc/xqa/mha.cu",
    } <= names
    assert not [name for name in names if "large.cu" in name or "header" in name or "deep" in name]
    assert "project/autotune/cli/main.py" in names

    script, into = inputs / "out" / "unpack_and_run.sh", inputs / "elsewhere"
    start = ("sh", script, "--into", into, "--python", sys.executable)
    shown = run(*start, "--", "--version")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()
    aot = into / "site" / "flashinfer" / "data" / "aot" / "xqa_some" / "xqa_some.so"
    assert aot.read_bytes() == b"\x7fELF kernel"
    assert (into / "autotune.db").read_bytes() == b"a study"
    assert "1 prebuilt kernels are in place" in shown.stderr

    # a second call unpacks nothing: what the host has written stays
    (into / "autotune.db").write_bytes(b"gone on")
    code = "import autotune, carried; from importlib import metadata as m\n"
    code += "print(autotune.__file__, carried.WHERE, m.version('flashinfer-python'))"
    again = run(*start, "--python-arguments", "-c", code)
    assert again.returncode == 0, again.stderr
    where = again.stdout.split()
    assert where == [str(into / "project/autotune/__init__.py"), str(into / "site/carried.py"), "9.9"]
    assert (into / "autotune.db").read_bytes() == b"gone on"


def test_kernels_of_another_version_are_refused_on_the_host(inputs: Path) -> None:
    manifest = inputs / "kernels" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"9.9"', '"9.8"'))
    assert packed(inputs).returncode == 0
    done = run(
        "sh", inputs / "out" / "unpack_and_run.sh", "--into", inputs / "x", "--python", sys.executable, "plan"
    )
    assert done.returncode != 0
    assert "was built for FlashInfer 9.8" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (inputs / "x" / "unpacked").exists()  # the next call tries again


def test_what_cannot_be_packed_is_one_clear_line(inputs: Path) -> None:
    done = packed(inputs, "--limit-mb", "0.001")
    assert done.returncode == 1
    assert "more than --limit-mb 0.001" in done.stderr
    assert not (inputs / "out" / "pack.tar.xz").exists()
    (inputs / "wheels" / "carried-2.0-py3-none-any.whl").write_bytes(b"")
    done = packed(inputs)
    assert done.returncode == 2
    assert "keep one version of each package" in done.stderr
    (inputs / "kernels" / "manifest.json").unlink()
    (inputs / "wheels" / "carried-2.0-py3-none-any.whl").unlink()
    assert "run 'autotune prebuild' first" in packed(inputs).stderr
    (inputs / "flashinfer_python-9.9-py3-none-any.whl").write_bytes(b"?")
    assert "is neither a wheel nor a tar" in packed(inputs).stderr
    done = run("sh", ROOT / "scripts" / "offline" / "unpack_and_run.sh")
    assert (done.returncode, "no pack at" in done.stderr) == (2, True)
