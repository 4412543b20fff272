"""Who else computes on a GPU that is about to be measured, as NVML sees it. No CUDA call."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.hardware.devices import Device

MIB = 2**20
# An idle GPU reads 0; a display or a monitoring tool stays below this.
BUSY_PERCENT = 10


def neighbours(devices: Sequence[Device]) -> list[str]:
    """A line for each device that somebody uses already; call it before the run starts children of its own.

    Processes of other containers may be hidden from us: then the utilisation tells. Without NVML, and for
    what a driver does not say (a MIG slice has no utilisation), nothing is known and nothing is said.
    """
    named = [(each.name, each.presence) for each in devices if each.facts.device == "cuda" and each.presence]
    if not named:
        return []
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [line for name, pci in named if (line := _line(nvml, name, pci))]
    finally:
        nvml.nvmlShutdown()


def _line(nvml: Any, name: str, pci: str) -> str:
    # by PCI address: NVML numbers devices in another order than CUDA, and ignores CUDA_VISIBLE_DEVICES
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci.encode())
    except nvml.NVMLError:
        return ""
    said = []
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        processes = []
    if processes:
        # None where the driver does not say, as in a container
        used = sum(process.usedGpuMemory or 0 for process in processes) // MIB
        pids = ", ".join(str(process.pid) for process in processes[:4])
        more = ", ..." if len(processes) > 4 else ""
        memory = f", {used} MiB" if used else ""
        who = "1 other process" if len(processes) == 1 else f"{len(processes)} other processes"
        said.append(f"{who} (pid {pids}{more}{memory})")
    try:
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
    except nvml.NVMLError:
        busy = 0
    if busy >= BUSY_PERCENT:
        said.append(f"{busy} % busy")
    return f"{name} is in use: {'; '.join(said)}; times measured beside others are noisier" if said else ""
