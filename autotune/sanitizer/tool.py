"""Where compute-sanitizer is, and how a stored proof is run under it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "compute-sanitizer"
# Seconds after which a proof under it ends itself, should whoever started it be gone; see `prove`.
LIMIT_VARIABLE = "AUTOTUNE_PROVE_LIMIT_S"
# In captured launches torch's allocator may not ask the driver for memory: there it must keep its cache.
CAPTURES = ("graph_replay",)
OPTIONS = (
    *("--tool", "memcheck"),
    # torch and FlashInfer probe the driver with calls that fail; those are nobody's fault
    *("--report-api-errors", "no"),
    # cudaMalloc puts allocations back to back: without it an overrun of one is an access to the next
    *("--padding", "512"),
    *("--show-backtrace", "device"),
    *("--print-limit", "10"),
    # the proof runs in the process that is started, compilers that it may start are not of interest
    *("--target-processes", "application-only"),
)


def find() -> Path | None:
    """The executable: on PATH, or in the toolkit of CUDA_HOME, CUDA_PATH or /usr/local/cuda."""
    if found := shutil.which(NAME):
        return Path(found)
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [Path(home, folder, NAME) for home in homes if home for folder in ("bin", NAME)]
    return next((path for path in places if path.is_file() and os.access(path, os.X_OK)), None)


def proof(repro: str) -> list[str]:
    """A stored repro command as its own process runs it: in plain memory, without the worker's child.

    Raises:
        ValueError: it is no ``autotune prove`` command.
    """
    words = shlex.split(repro)
    if words[:2] != ["autotune", "prove"]:
        raise ValueError(f"not a command of autotune prove: {repro[:80]!r}")
    return [sys.executable, "-m", "autotune.cli.main", *words[1:], "--arena", "plain", "--in-process"]


def command(tool: Path, repro: str) -> list[str]:
    """``repro`` under ``tool``; raises as :func:`proof`."""
    return [str(tool), *OPTIONS, *proof(repro)]


def environment(repro: str, limit_s: float, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the process inherits: torch's caching allocator off, so that the tool sees exact sizes.

    Args:
        limit_s: the process ends itself a little later than this.
        base: None: this process's own.
    """
    env = dict(os.environ if base is None else base)
    # expandable segments make the tool report accesses that are none (pytorch#196209)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        env.pop(name, None)
    if not any(f"--check {name}" in repro for name in CAPTURES):
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    env["LC_ALL"] = "C"
    env[LIMIT_VARIABLE] = str(int(limit_s) + 10)
    return env
