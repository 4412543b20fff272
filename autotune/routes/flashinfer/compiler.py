"""What FlashInfer needs to compile a module at its first use, and what of it is not here.

Looks at files and variables only; nothing of FlashInfer or CUDA is imported or run.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

# A copy that was trimmed for prebuilt modules has none of these (flashinfer/data of 0.6.18.post1 and 0.7.2).
HEADERS = ("include", "cutlass")


def toolkit() -> Path | None:
    """The CUDA toolkit that FlashInfer's build would take: CUDA_HOME, CUDA_PATH, nvcc's, the usual folder."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return Path(os.environ[name])
    nvcc = shutil.which("nvcc")
    candidates = [Path(nvcc).resolve().parent.parent] if nvcc else []
    for home in (*candidates, Path("/usr/local/cuda")):
        if (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda.h").is_file():
            return home
    return None


def has_ninja() -> bool:
    """On PATH, or beside this interpreter."""
    return bool(shutil.which("ninja")) or (Path(sys.executable).parent / "ninja").exists()


def has_cxx() -> bool:
    """A C++ compiler: ``CXX``, else ``c++``."""
    return shutil.which(os.environ.get("CXX", "c++")) is not None


def lacking(package: Path) -> str | None:
    """Why the FlashInfer in ``package`` cannot compile a module here, in a few words; None if it may."""
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return "FLASHINFER_DISABLE_JIT is set"
    home = toolkit()
    if home is None or not (home / "bin" / "nvcc").is_file():
        return "no nvcc"
    if not has_ninja():
        return "no ninja"
    if not has_cxx():
        return "no C++ compiler"
    return headers_lacking(package)


def headers_lacking(package: Path) -> str | None:
    """Why the FlashInfer in ``package`` has nothing to compile against; None if it has."""
    missing = [name for name in HEADERS if not (package / "data" / name).is_dir()]
    return f"this FlashInfer was installed without data/{missing[0]}" if missing else None
