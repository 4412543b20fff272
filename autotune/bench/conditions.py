"""How a device ran while rounds were timed: clocks, temperature, power and why it was slowed, from NVML."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Protocol

# nvml.h, nvmlClocksEventReason*; names as nvidia-smi prints them.
REASONS = {
    0x0001: "gpu_idle",
    0x0002: "applications_clocks_setting",
    0x0004: "sw_power_cap",
    0x0008: "hw_slowdown",
    0x0010: "sync_boost",
    0x0020: "sw_thermal_slowdown",
    0x0040: "hw_thermal_slowdown",
    0x0080: "hw_power_brake_slowdown",
    0x0100: "display_clock_setting",
}
# What says that the device was in trouble. A power cap is how a loaded GPU runs every day.
SLOWDOWNS = frozenset(
    {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)


@dataclass(frozen=True, slots=True)
class Conditions:
    """One reading; None where the driver does not say."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    reasons: tuple[str, ...] = ()

    @property
    def slowdown(self) -> str:
        """The hardware or thermal slow-downs that are active, by name; "" if none is."""
        return ", ".join(reason for reason in self.reasons if reason in SLOWDOWNS)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {**asdict(self), "reasons": list(self.reasons)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Conditions:
        """Inverse of :meth:`to_dict`."""
        return cls(**{**data, "reasons": tuple(data["reasons"])})


class Monitor(Protocol):
    """Reads a device's conditions."""

    def read(self) -> Conditions | None:
        """A reading; None if the device has none to give."""


class NoMonitor:
    """A device that says nothing."""

    def read(self) -> Conditions | None:
        """None."""
        return None


class NvmlMonitor:
    """One GPU by its NVML handle; a value that the driver refuses is None, the others are still read."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def read(self) -> Conditions | None:
        """See :class:`Monitor`; about 0.1 ms."""
        nvml, handle = self._nvml, self._handle
        # renamed in driver 535; the older name stays for older bindings
        active = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        mask = self._ask(active, handle) if active is not None else None
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        return Conditions(
            sm_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1000.0,
            reasons=tuple(name for bit, name in REASONS.items() if (mask or 0) & bit),
        )

    def _ask(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except self._nvml.NVMLError:
            return None


@lru_cache(maxsize=8)
def cuda_monitor(index: int) -> Monitor:
    """The monitor of this process's CUDA device ``index``; a silent one without NVML or its bindings."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return NoMonitor()
    import torch

    properties: Any = torch.cuda.get_device_properties(index)
    # by address: NVML numbers devices in another order than CUDA, and ignores CUDA_VISIBLE_DEVICES
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        address = (
            f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        )
        nvml.nvmlInit()
        return NvmlMonitor(nvml, nvml.nvmlDeviceGetHandleByPciBusId(address.encode()))
    return NoMonitor()
