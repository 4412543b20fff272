"""What is missing for a build is one line; the stub driver library has the symbols that modules bind."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from autotune.prebuild.errors import PrebuildError
from autotune.prebuild.toolchain import Toolchain, find, stub_driver

CUDA_H = """
typedef int CUresult;
#define CUDAAPI
#define cuMemAlloc cuMemAlloc_v2
extern "C" {
CUresult CUDAAPI cuTensorMapEncodeTiled(void *map);
CUresult CUDAAPI cuMemAlloc(void *p, unsigned long n);
}
"""


def toolkit(tmp_path: Path, cuda_h: str = CUDA_H) -> Path:
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n")
    nvcc.chmod(0o755)
    (home / "include" / "cuda.h").write_text(cuda_h)
    return home


def headers(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "headers"
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("")
    return folder


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
needs_ninja = pytest.mark.skipif(shutil.which("ninja") is None, reason="needs ninja")


def test_no_compiler_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(PrebuildError, match="nvcc does not run") as raised:
        find()
    assert "\n" not in str(raised.value) and "CUDA_HOME" in str(raised.value)


@needs_compiler
@needs_ninja
def test_a_missing_header_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path)))
    monkeypatch.setattr("autotune.prebuild.toolchain._packaged_includes", list)
    with pytest.raises(PrebuildError, match=r"curand\.h not found: pip install --no-deps nvidia-curand"):
        find()
    with pytest.raises(PrebuildError, match=r"cublasLt\.h not found: pip install --no-deps nvidia-cublas"):
        find([headers(tmp_path, "curand.h")])
    found = find([headers(tmp_path, "curand.h", "cublasLt.h")])
    assert found.cuda == "13.0" and found.include_dirs == (tmp_path / "headers",)


@needs_compiler
@needs_ninja
def test_no_ninja(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path)))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("autotune.routes.flashinfer.compiler.sys.executable", str(tmp_path / "python"))
    with pytest.raises(PrebuildError, match="ninja not found"):
        find()


def test_environment_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CPATH", "/mine")
    monkeypatch.setenv("LIBRARY_PATH", "/libs")
    chain = Toolchain(tmp_path, "13.0", (tmp_path / "a", tmp_path / "b"))
    environment = chain.environment(tmp_path / "stub")
    assert environment["CPATH"] == f"{tmp_path}/a:{tmp_path}/b:/mine"
    assert environment["LIBRARY_PATH"] == f"{tmp_path}/stub:/libs"
    assert environment["CUDA_HOME"] == str(tmp_path) and environment["MAX_JOBS"] == "1"


@needs_compiler
def test_stub_driver_defines_every_declared_function(tmp_path: Path) -> None:
    chain = Toolchain(toolkit(tmp_path), "13.0", ())
    folder = stub_driver(chain, tmp_path / "stub")
    library = ctypes.CDLL(str(folder / "libcuda.so"))
    assert library.cuTensorMapEncodeTiled() == 999
    assert library.cuMemAlloc_v2() == 999
    assert b"libcuda.so.1" in (folder / "libcuda.so").read_bytes()
    before = (folder / "libcuda.so").stat().st_mtime_ns
    stub_driver(chain, tmp_path / "stub")
    assert (folder / "libcuda.so").stat().st_mtime_ns == before


@needs_compiler
def test_a_toolkit_without_tensor_maps_is_refused(tmp_path: Path) -> None:
    chain = Toolchain(toolkit(tmp_path, "typedef int CUresult;\nCUresult cuInit();\n"), "11.0", ())
    with pytest.raises(PrebuildError, match="CUDA 12 or later"):
        stub_driver(chain, tmp_path / "stub")
