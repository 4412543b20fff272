"""Is this the machine that ``--gpu`` names? In words, and as a refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.hardware import cpu
from autotune.hardware.collect import collect, has_nvidia_device
from autotune.hardware.errors import HardwareError, NoDevice, WrongMachine

if TYPE_CHECKING:
    from autotune.domain.fingerprint import Facts
    from autotune.hardware.profile import DeviceProfile

# As the tuner's children have them; this process need not have imported torch.
PINNED_THREADS = 1

# Commands that need no such device.
ELSEWHERE = ("plan", "show", "explain", "export")


def _cpu(facts: Facts) -> str:
    cores = facts.hardware["cores"]
    return f"CPU: {facts.hardware['name']}, {cores} core{'' if cores == 1 else 's'}"


def describe(facts: Facts) -> str:
    """One device in a few words: ``NVIDIA H200 (compute capability 9.0, 132 SMs)``."""
    if facts.device == "cpu":
        return _cpu(facts)
    hardware = facts.hardware
    capability, sms = hardware["compute_capability"], hardware["sm_count"]
    return f"{hardware['name']} (compute capability {capability}, {sms} SMs)"


def present(facts: Facts | None = None) -> str:
    """What is here, in one line: ``no CUDA device; CPU: Intel(R) Xeon(R) Processor, 2 cores``.

    Args:
        facts: what ``collect()`` found for the CUDA device, if the caller has it already.
    """
    if facts is not None and facts.device == "cuda":
        return describe(facts)
    here = _cpu(facts if facts is not None else cpu.cpu_facts(PINNED_THREADS))
    if not has_nvidia_device():
        return f"no CUDA device; {here}"
    try:
        return describe(collect("cuda"))
    except HardwareError as error:
        return f"an NVIDIA device that cannot be used ({error}); {here}"


def require(profile: DeviceProfile, facts: Facts | None = None) -> Facts:
    """The facts of the device that ``profile`` names, as the tuner measures on it (one CPU thread).

    Only kind, name and compute capability can refuse; a power limit or a count of SMs that differs is
    another fingerprint, not another machine.

    Args:
        facts: what was found here; collected if None.

    Raises:
        WrongMachine: this is another machine; the line says what is here and what works on it.
        HardwareError: the device is there and does not answer.
    """
    if facts is None:
        try:
            if profile.kind == "cuda" and not has_nvidia_device():  # torch takes seconds to find out
                raise NoDevice("no NVIDIA device")
            facts = collect(profile.kind, threads=PINNED_THREADS)
        except NoDevice:
            facts = cpu.cpu_facts(PINNED_THREADS)
    if profile.matches(facts):
        return facts
    works = f"{', '.join(f'`{name}`' for name in ELSEWHERE[:-1])} and `{ELSEWHERE[-1]}`"
    raise WrongMachine(
        f"--gpu {profile.name} asks for {profile}, and this machine has {present(facts)}: "
        f"{works} work here, and so does --gpu cpu"
    )
