"""``autotune prebuild`` that is interrupted or killed while a compiler is at work."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.console import Script

# A library that compiles as soon as it is imported, with half a module in the folder.
LIBRARY = """
import os, pathlib, subprocess
work = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
module = work.with_name(work.name.removesuffix(".work")) / "xqa_x"
module.mkdir(parents=True)
(module / "xqa_x.partial").write_bytes(b"half")
subprocess.run(["ninja"], check=True)
"""
# Each compiler in a process group of its own, as ninja has them.
NINJA = """#!/bin/sh
set -m
"$CUDA_HOME/bin/nvcc" -c x.cu &
wait
"""
NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release 13.0" && exit
sh -c 'echo $$ > "$FLASHINFER_WORKSPACE_BASE/compiling"; exec sleep 300'
true
"""
CXX = """#!/bin/sh
case "$1" in
-E) echo "CUresult cuTensorMapEncodeTiled (int);" ;;
*) touch "$5" ;;
esac
"""


def toolkit(folder: Path) -> dict[str, str]:
    """Stand-ins for library, toolkit, ninja and compiler; the environment in which they are found."""
    (folder / "flashinfer").mkdir()
    (folder / "flashinfer" / "__init__.py").write_text(LIBRARY)
    for name, text in (("bin/nvcc", NVCC), ("bin/ninja", NINJA), ("bin/c++", CXX)):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / "include").mkdir()
    for name in ("cuda.h", "curand.h", "cublasLt.h"):
        (folder / "include" / name).write_text("CUresult cuTensorMapEncodeTiled(int);\n")
    return {
        "CUDA_HOME": str(folder),
        "CXX": str(folder / "bin" / "c++"),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_compiler_outlives_it(number: signal.Signals, tmp_path: Path) -> None:
    environment = toolkit(tmp_path)
    out, work = tmp_path / "out", tmp_path / "out.work"
    started = Script(["prebuild", "--gpu", "h200", "--out", str(out)], tmp_path, environment)
    started.until((work / "compiling").exists)
    started.send(number)
    ended = started.end()
    if number is signal.SIGKILL:  # which leaves it no time to tidy up, and its kernel all the same
        assert ended.code == -signal.SIGKILL
    else:
        assert ended.code == 130
        assert ended.line.startswith("autotune: interrupted; ")
        assert not out.exists() and not list(work.rglob("*.partial"))
    deadline = time.monotonic() + 60
    while (left := started.survivors()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []
