"""Facts of the CPU that a CPU kernel's verdict depends on."""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from autotune.domain.fingerprint import Facts, Scalar

CPUINFO = Path("/proc/cpuinfo")

# Instruction sets by which ATen, oneDNN and MKL choose a kernel, as /proc/cpuinfo spells them (x86-64,
# then AArch64). Anything else in the list of flags does not change what runs.
ISA_FLAGS = frozenset(
    {
        "sse4_2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512cd",
        "avx512dq",
        "avx512vl",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
        "amx_fp16",
        "avx10_1",
        "avx10_2",
        "asimd",
        "asimdhp",
        "asimddp",
        "asimdfhm",
        "sve",
        "sve2",
        "bf16",
        "i8mm",
        "svebf16",
        "sme",
        "sme2",
    }
)

# A user who sets one of these runs other kernels than the flags say.
ISA_OVERRIDES = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def _fields(text: str) -> Iterator[tuple[str, str]]:
    """Key and value of each line of the first processor."""
    for line in text.split("\n\n", 1)[0].splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def model_name(cpuinfo: str) -> str:
    """The CPU's name; on AArch64, which has none, its implementer and part; else what ``platform`` knows."""
    fields = dict(_fields(cpuinfo))
    if name := fields.get("model name"):
        return " ".join(name.split())
    if "CPU part" in fields:
        return f"{platform.machine()} {fields.get('CPU implementer', '?')}/{fields['CPU part']}"
    return platform.processor() or platform.machine() or "unknown"


def isa(cpuinfo: str) -> str:
    """Relevant instruction sets, sorted, one space between; environment overrides follow.

    Falls back to the machine's architecture where flags are not listed (macOS).
    """
    fields = dict(_fields(cpuinfo))
    flags = set((fields.get("flags") or fields.get("Features") or "").split()) & ISA_FLAGS
    words = sorted(flags) or [platform.machine() or "unknown"]
    words += [f"{name}={os.environ[name]}" for name in ISA_OVERRIDES if os.environ.get(name)]
    return " ".join(words)


def cores() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def torch_version() -> tuple[str | None, str | None]:
    """torch's version and commit without importing torch (2 s); (None, None) if it is not installed."""
    if (module := sys.modules.get("torch.version")) is not None:
        return module.__version__, module.git_version
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None, None
    path = Path(next(iter(found.submodule_search_locations))) / "version.py"
    values = literals(path)
    return values.get("__version__"), values.get("git_version")


def literals(path: Path) -> dict[str, str]:
    """Module-level string constants of a Python file, read and not run; {} if it cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            values.update({target.id: node.value.value for target in targets if isinstance(target, ast.Name)})
    return values


def informative() -> dict[str, Scalar]:
    """Facts worth recording that decide nothing."""
    return {
        "python": platform.python_version(),
        "os": platform.platform(terse=True),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }


def torch_threads() -> int | None:
    """torch's intra-op threads in this process; None (not known) where torch is not imported."""
    torch = sys.modules.get("torch")
    asked = getattr(torch, "get_num_threads", None)  # absent while torch is still being imported
    return int(asked()) if asked is not None else None


def cpu_facts(threads: int | None = None) -> Facts:
    """The facts of this machine's CPU.

    Args:
        threads: torch's intra-op threads in the process that calls the kernels; None: those of this process.
            The tuner pins one, since two with a busy neighbour stall for milliseconds.
    """
    if threads is None:
        threads = torch_threads()
    try:
        cpuinfo = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # macOS, or a sandbox
        cpuinfo = ""
    version, commit = torch_version()
    return Facts(
        device="cpu",
        hardware={"name": model_name(cpuinfo), "cores": cores(), "threads": threads, "isa": isa(cpuinfo)},
        software={"torch": version, "torch_commit": commit},
        informative=informative(),
    )
