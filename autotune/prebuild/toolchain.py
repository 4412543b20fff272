"""The compiler, headers and stub driver library that a build without a GPU needs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.prebuild import session
from autotune.prebuild.errors import PrebuildError
from autotune.routes.flashinfer.compiler import has_cxx, has_ninja, toolkit

# header -> the package that ships it where the toolkit is a partial one
HEADERS = {"cuda.h": "the CUDA toolkit", "curand.h": "nvidia-curand", "cublasLt.h": "nvidia-cublas"}
# What every SM90 module binds; an older toolkit has no such function.
STUB_NEEDS = "cuTensorMapEncodeTiled"
_DRIVER_FUNCTION = re.compile(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Where things are.

    Attributes:
        cuda_home: holds ``bin/nvcc`` and ``include/cuda.h``.
        cuda: the toolkit's release, such as ``"13.0"``.
        include_dirs: searched after the toolkit's own.
    """

    cuda_home: Path
    cuda: str
    include_dirs: tuple[Path, ...]

    def environment(self, stub_dir: Path) -> dict[str, str]:
        """Variables for the child that builds."""
        joined = os.pathsep.join(str(path) for path in self.include_dirs)
        inherited = [os.environ[name] for name in ("CPATH",) if os.environ.get(name)]
        libraries = [str(stub_dir), *([os.environ["LIBRARY_PATH"]] if os.environ.get("LIBRARY_PATH") else [])]
        return {
            "CUDA_HOME": str(self.cuda_home),
            # one compiler a module: modules are what runs in parallel
            "MAX_JOBS": "1",
            "CPATH": os.pathsep.join([part for part in (joined, *inherited) if part]),
            "LIBRARY_PATH": os.pathsep.join(libraries),
        }


def _packaged_includes() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    found: list[Path] = []
    for root in roots:
        found += sorted(path for path in root.glob("*/include") if path.is_dir())
    return found


def find(extra_includes: Sequence[Path] = ()) -> Toolchain:
    """Locate the toolkit and headers.

    Raises:
        PrebuildError: nvcc, ninja, a C++ compiler or a header is missing; the first of :func:`examine`.
    """
    found, missing = examine(extra_includes)
    if found is None:
        raise PrebuildError(missing[0])
    return found


def examine(extra_includes: Sequence[Path] = ()) -> tuple[Toolchain | None, list[str]]:
    """The toolchain, or None and what is missing of it, each in one line with what to do."""
    missing: list[str] = []
    home, release = toolkit(), ""
    if home is None:
        missing.append("nvcc not found: put it on PATH or set CUDA_HOME to a toolkit of CUDA 12.8 or later")
    else:
        try:
            release = _release(home)
        except PrebuildError as error:
            missing.append(str(error))
    if not has_ninja():
        missing.append("ninja not found: pip install ninja")
    if not has_cxx():
        missing.append("no C++ compiler: install g++ or set CXX")
    if home is None:
        return None, missing
    places = [home / "include", *extra_includes, *_packaged_includes()]
    wanted: list[Path] = []
    for header, package in HEADERS.items():
        place = next((path for path in places if (path / header).is_file()), None)
        if place is None:
            missing.append(
                f"header {header} not found: pip install --no-deps {package}"
                if package.startswith("nvidia-")
                else f"header {header} not found under {home}/include: set CUDA_HOME to {package}"
            )
        elif header == "cuda.h" and STUB_NEEDS not in (place / header).read_text(errors="replace"):
            missing.append(_no_stub(home))
        elif place != home / "include" and place not in wanted:
            wanted.append(place)
    return (None, missing) if missing else (Toolchain(home, release, tuple(wanted)), [])


def _no_stub(home: Path) -> str:
    return (
        f"{home}/include/cuda.h does not declare {STUB_NEEDS}, which the stub driver library defines: "
        "a toolkit of CUDA 12 or later is needed"
    )


def _release(home: Path) -> str:
    try:
        said = session.run([str(home / "bin" / "nvcc"), "--version"])
        said.check_returncode()
    except (OSError, subprocess.CalledProcessError) as error:
        raise PrebuildError(f"{home}/bin/nvcc does not run ({error}): set CUDA_HOME to a toolkit") from error
    release = re.search(r"release (\d+\.\d+)", said.stdout)
    if release is None:
        raise PrebuildError(f"{home}/bin/nvcc names no release: set CUDA_HOME to a CUDA toolkit")
    return release[1]


def stub_driver(toolchain: Toolchain, folder: Path) -> Path:
    """Build ``folder/libcuda.so``, a driver library that defines every driver function and does nothing.

    An empty stub is dropped by the linker, and the module then dies on the GPU machine at its first call
    with "symbol lookup error" and exit status 127. SONAME ``libcuda.so.1`` makes the real driver load there.

    Raises:
        PrebuildError: the compiler failed, or the toolkit's ``cuda.h`` is not what it should be.
    """
    library = folder / "libcuda.so"
    if library.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "c++")
    preprocessed = session.run(
        [compiler, "-E", "-x", "c++", f"-I{toolchain.cuda_home}/include", "-"], "#include <cuda.h>\n"
    )
    names = sorted(set(_DRIVER_FUNCTION.findall(preprocessed.stdout)))
    if preprocessed.returncode or STUB_NEEDS not in names:
        raise PrebuildError(_no_stub(toolchain.cuda_home))
    source = folder / "libcuda_stub.cpp"
    # 999 is CUDA_ERROR_UNKNOWN: a process that binds the stub by mistake fails at its first driver call
    source.write_text("".join(f'extern "C" int {name}() {{ return 999; }}\n' for name in names))
    partial = folder / "libcuda.so.partial"
    built = session.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(partial), str(source)]
    )
    if built.returncode:
        raise PrebuildError(f"the stub driver library did not build: {built.stderr.strip().splitlines()[-1]}")
    partial.replace(library)
    return folder
