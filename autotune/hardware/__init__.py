"""The facts of this machine, and whether it is the one that a profile names."""

from __future__ import annotations

from autotune.hardware.collect import collect
from autotune.hardware.errors import HardwareError, NoDevice, WrongMachine
from autotune.hardware.match import describe, present, require
from autotune.hardware.profile import DeviceProfile, architecture_of

__all__ = [
    "DeviceProfile",
    "HardwareError",
    "NoDevice",
    "WrongMachine",
    "architecture_of",
    "collect",
    "describe",
    "present",
    "require",
]
