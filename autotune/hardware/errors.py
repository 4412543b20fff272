"""What can be wrong with a machine; each message is one line."""

from __future__ import annotations

from typing import ClassVar


class HardwareError(RuntimeError):
    """The facts of a device cannot be had: no such device, or a driver or torch that does not answer."""

    exit_code: ClassVar[int] = 1


class NoDevice(HardwareError):  # noqa: N818
    """The machine has no CUDA device that torch can use."""

    exit_code: ClassVar[int] = 3


class WrongMachine(HardwareError):  # noqa: N818
    """This machine is not the one that a profile names."""

    exit_code: ClassVar[int] = 3
