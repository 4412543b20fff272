"""Several devices of one machine for one study: which ones are asked for, and whether they are alike."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.domain.fingerprint import HARDWARE_KEYS, SOFTWARE_KEYS, Facts
from autotune.hardware.collect import collect_cuda, has_nvidia_device
from autotune.hardware.errors import NoDevice, WrongMachine
from autotune.hardware.match import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autotune.hardware.profile import DeviceProfile

ALL = "all"


class BadDevicesError(ValueError):
    """A list of devices that cannot be read, or that names one which is not there; one line."""


@dataclass(frozen=True)
class Device:
    """One device that is to work.

    Attributes:
        index: as CUDA counts in this process (``CUDA_VISIBLE_DEVICES`` is heeded); on the CPU the place of
            a core among those that this process may use.
        facts: what was found there.
    """

    index: int
    facts: Facts

    @property
    def name(self) -> str:
        """``cuda:1`` or ``cpu:1``: what a worker pins its child to."""
        return f"{self.facts.device}:{self.index}"

    @property
    def presence(self) -> str | None:
        """What a child that is tied to it must find: a GPU's PCI address, as ``00000000:3B:00.0``; on the
        CPU the core's number. None: not known."""
        if self.facts.device == "cpu":
            return str(cpus()[self.index])
        found = self.facts.informative.get("pci")
        return found if isinstance(found, str) else None


def parse(text: str) -> tuple[int, ...] | None:
    """The numbers that ``--devices`` names, in its order; None for ``all``.

    Raises:
        BadDevicesError: it is no list of numbers, or has one twice.
    """
    if text.strip() == ALL:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise BadDevicesError(
            f"--devices {text!r}: write numbers from 0 with commas between them, such as 0,1, or all"
        )
    found = tuple(int(word) for word in words)
    if (twice := next((index for index in found if found.count(index) > 1), None)) is not None:
        raise BadDevicesError(f"--devices {text}: {twice} is named twice")
    return found


def choose(text: str, count: int) -> tuple[int, ...]:
    """The devices that ``--devices`` names, of ``count`` that there are.

    Raises:
        BadDevicesError: see :func:`parse`; or one that is not there.
    """
    found = parse(text)
    if found is None:
        return tuple(range(count))
    if (absent := next((index for index in found if index >= count), None)) is not None:
        there = "0 alone is" if count == 1 else f"0 to {count - 1} are"
        raise BadDevicesError(f"--devices {text}: there is no device {absent}, {there} here")
    return found


def cpus() -> list[int]:
    """Numbers of the cores that this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def select(
    text: str, profile: DeviceProfile, warn: Callable[[str], None] = lambda line: None
) -> tuple[Device, ...]:
    """The devices that ``--devices`` names: each is what ``profile`` asks for, all are of one fingerprint.

    Args:
        warn: told in one line of each GPU that ``all`` leaves out because it does not answer.

    Raises:
        BadDevicesError: see :func:`choose`.
        WrongMachine: the first is not what the profile names, or another differs from it in a fact that a
            study is bound to.
        HardwareError: one that is named by its number cannot be used, or none can.
    """
    named = parse(text)  # a slip of the pen is told before anything is probed
    if profile.kind == "cpu" or not has_nvidia_device():
        facts = require(profile)
        return tuple(Device(index, facts) for index in choose(text, len(cpus())))
    found = collect_cuda()
    devices, silent = [], []
    for index in choose(text, len(found)):
        facts_or_reason = found[index]
        if isinstance(facts_or_reason, str):
            silent.append(f"cuda:{index} cannot be used: {facts_or_reason}")
        else:
            devices.append(Device(index, facts_or_reason))
    if silent and (named is not None or not devices):
        more = f" (and {len(silent) - 1} more)" if silent[1:] else ""
        raise NoDevice(f"--devices {text}: {silent[0]}{more}")
    require(profile, devices[0].facts)
    require_alike(devices)
    for line in silent:
        warn(f"--devices {text}: {line}; the run goes on without it")
    return tuple(devices)


def require_alike(devices: Sequence[Device]) -> None:
    """See that one study may hold what all of them measure.

    Raises:
        WrongMachine: one of another fingerprint; the line names the first fact that differs.
    """
    for device in devices[1:]:
        if (found := _difference(devices[0].facts, device.facts)) is not None:
            fact, ours, theirs = found
            raise WrongMachine(
                f"{device.name} differs from {devices[0].name} in {fact} ({theirs!r}, not {ours!r}): a study "
                "holds devices of one fingerprint; run them one by one, each with its own --devices"
            )


def _difference(ours: Facts, theirs: Facts) -> tuple[str, object, object] | None:
    for part, keys, mine, other in (
        ("hardware", HARDWARE_KEYS, ours.hardware, theirs.hardware),
        ("software", SOFTWARE_KEYS, ours.software, theirs.software),
    ):
        for key in keys[ours.device]:
            if mine.get(key) != other.get(key):
                return f"{part}.{key}", mine.get(key), other.get(key)
    return None
