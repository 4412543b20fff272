"""Prints the facts of one CUDA device as JSON; run as a process of its own.

A process that has initialised CUDA cannot fork children that use it, and the tuner's worker is forked:
so the parent asks this short-lived process instead. ``python -m autotune.hardware.cuda_probe [INDEX | all]``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from typing import Any

GIB = 2**30
MIB = 2**20


def _nvml(pci_bus_id: str) -> dict[str, Any]:
    """Power limit (W), MIG mode and driver version from NVML; each None where NVML does not say."""
    facts: dict[str, Any] = {"power_limit_w": None, "mig": None, "driver": None}
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return facts
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return facts
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        facts["driver"] = driver.decode() if isinstance(driver, bytes) else str(driver)
        # by PCI address: NVML numbers devices in another order than CUDA, and ignores CUDA_VISIBLE_DEVICES
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
    except pynvml.NVMLError:
        pynvml.nvmlShutdown()
        return facts
    with contextlib.suppress(pynvml.NVMLError):
        facts["power_limit_w"] = round(pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000)
    try:
        facts["mig"] = bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError as error:
        # a device that has no MIG says so; any other error leaves the fact unknown
        if getattr(error, "value", None) == getattr(pynvml, "NVML_ERROR_NOT_SUPPORTED", 3):
            facts["mig"] = False
    pynvml.nvmlShutdown()
    return facts


def _count() -> int | str:
    """How many CUDA devices there are, at least one; or why there is none."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return torch.cuda.device_count()


def probe(index: int = 0) -> dict[str, Any]:
    """Facts of device ``index`` in this process, which initialises CUDA here.

    Returns:
        ``{"error": "..."}``, or ``hardware`` and ``software`` with the keys of ``domain.fingerprint``
        that torch and NVML know, and ``informative``.
    """
    count = _count()
    if isinstance(count, str):
        return {"error": count}
    import torch

    if not 0 <= index < count:
        return {"error": f"there is no device cuda:{index}; this machine has {count}"}
    device = torch.cuda.get_device_properties(index)
    pci = "{:08X}:{:02X}:{:02X}.0".format(
        *(getattr(device, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"))
    )
    nvml = _nvml(pci)
    return {
        "hardware": {
            "name": device.name,
            "compute_capability": f"{device.major}.{device.minor}",
            "sm_count": device.multi_processor_count,
            "memory_gib": round(device.total_memory / GIB),
            "l2_mib": round(device.L2_cache_size / MIB),
            "power_limit_w": nvml["power_limit_w"],
            "mig": nvml["mig"],
        },
        "software": {"cuda": torch.version.cuda, "driver": nvml["driver"]},
        "informative": {
            "torch": torch.__version__,
            "torch_commit": torch.version.git_version,
            "memory_bytes": device.total_memory,
            "devices": count,
            "pci": pci,
        },
    }


def probe_all() -> dict[str, Any]:
    """:func:`probe` of every device as ``{"all": [...]}``; one that does not answer spoils no other."""
    count = _count()
    if isinstance(count, str):
        return {"error": count}
    found: list[dict[str, Any]] = []
    for index in range(count):
        try:
            found.append(probe(index))
        except RuntimeError as error:
            found.append({"error": " ".join(str(error).split()) or type(error).__name__})
    return {"all": found}


def main(arguments: list[str]) -> dict[str, Any]:
    """What is asked for on the command line."""
    return probe_all() if arguments == ["all"] else probe(int(arguments[0]) if arguments else 0)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1:])) + "\n")
