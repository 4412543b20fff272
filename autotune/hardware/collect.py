"""``collect()``: the facts of this machine, in the words of ``domain.fingerprint``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotune.domain.fingerprint import Facts
from autotune.hardware import cpu
from autotune.hardware.errors import HardwareError, NoDevice
from autotune.hardware.flashinfer import flashinfer_facts

# torch's first import on a cold disk took 6.6 s; a driver that answers slower than this is not well.
PROBE_TIMEOUT_S = 120.0

_DEV = Path("/dev")


def has_nvidia_device() -> bool:
    """Whether the kernel shows an NVIDIA device node (or WSL's); says nothing of drivers. No CUDA call."""
    return any(_DEV.glob("nvidia[0-9]*")) or (_DEV / "dxg").exists()


def _probe(index: int | None) -> dict[str, Any]:
    """What ``cuda_probe`` finds: in a short process, or here where this process already uses CUDA.

    Args:
        index: None: every device, as ``{"all": [...]}``.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        from autotune.hardware.cuda_probe import probe, probe_all

        return probe_all() if index is None else probe(index)
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "autotune.hardware.cuda_probe", "all" if index is None else str(index)],
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HardwareError(f"the CUDA probe did not answer: {error}") from error
    try:
        # a driver or a site hook may print before us
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise HardwareError(f"the CUDA probe ended with exit status {done.returncode}: {last}") from error
    if not isinstance(found, dict):
        raise HardwareError(f"the CUDA probe printed {found!r}")
    return found


def _cuda_facts(index: int) -> Facts:
    found = _probe(index)
    if "error" in found:
        raise NoDevice(found["error"])
    return _facts_of(found)


def _facts_of(found: dict[str, Any]) -> Facts:
    return Facts(
        device="cuda",
        hardware=found["hardware"],
        software={**flashinfer_facts(), **found["software"]},
        informative={**cpu.informative(), **found["informative"]},
    )


def collect_cuda() -> list[Facts | str]:
    """The facts of every CUDA device that this process sees, in CUDA's order, from one short process.

    Returns:
        One an index; a line that says why for a device that does not answer. Never empty.

    Raises:
        NoDevice: there is no CUDA device.
        HardwareError: the driver or torch does not answer.
    """
    found = _probe(None)
    if "error" in found:
        raise NoDevice(found["error"])
    return [each["error"] if "error" in each else _facts_of(each) for each in found["all"]]


def collect(device: str | None = None, *, threads: int | None = None) -> Facts:
    """The facts of one device of this machine.

    CUDA is asked in a short-lived process, so that this one may still fork workers; a process that
    already uses CUDA (a serving process) asks directly.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:1``; None takes the first CUDA device, else the CPU.
        threads: torch's intra-op threads on the CPU, where another process has them (the tuner pins one in
            its children). None looks: those of this process, not known where torch is not imported.

    Raises:
        ValueError: ``device`` is none of these.
        NoDevice: CUDA was asked for and there is no such device.
        HardwareError: the device is there and does not answer.
    """
    if device is None:
        if not has_nvidia_device():
            return cpu.cpu_facts(threads)
        try:
            return _cuda_facts(0)
        except NoDevice:
            return cpu.cpu_facts(threads)
    if device == "cpu":
        return cpu.cpu_facts(threads)
    kind, colon, index = device.partition(":")
    if kind != "cuda" or (colon and not index.isdecimal()):
        raise ValueError(f"device must be cpu, cuda or cuda:N, not {device!r}")
    return _cuda_facts(int(index or 0))
