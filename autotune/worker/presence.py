"""Whether a worker's device answers, and which one it is: asked of its child, where it would be used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.worker.base import Completed, WorkerError

if TYPE_CHECKING:
    from autotune.worker.base import Channel, Runs

# A CUDA context takes seconds on a busy host; a device that needs longer for one addition is not well.
TIMEOUT_S = 60.0
# A child that an earlier fault spoilt is not the device: the second question goes to a fresh one.
ATTEMPTS = 2


@dataclass(frozen=True)
class PresenceJob:
    """Use the device for one addition.

    The value is which device the child has: a GPU's PCI address, ``00000000:3B:00.0``; on the CPU the cores
    that it may use, ``3`` or ``0,1``.

    Attributes:
        device: ``cpu`` or ``cuda``, the child's one.
    """

    device: str

    def __call__(self, channel: Channel) -> str:
        """Answer, or raise what the device says."""
        import torch

        total = torch.ones(64, device=self.device).sum()
        if float(total) != 64.0:
            raise RuntimeError(f"the device adds 64 ones up to {float(total)}")
        if self.device.partition(":")[0] == "cpu":
            return ",".join(map(str, sorted(os.sched_getaffinity(0))))
        found: Any = torch.cuda.get_device_properties(self.device)
        return f"{found.pci_domain_id:08X}:{found.pci_bus_id:02X}:{found.pci_device_id:02X}.0"


def trouble(worker: Runs, device: str, expected: str | None = None) -> str | None:
    """Why ``worker`` cannot go on with its device, in one line; None if it can.

    Args:
        device: ``cpu`` or ``cuda``.
        expected: what :class:`PresenceJob` must answer; None: anything.
    """
    said = ""
    for _ in range(ATTEMPTS):
        try:
            outcome = worker.run(PresenceJob(device), timeout_s=TIMEOUT_S, step_timeout_s=TIMEOUT_S)
        except WorkerError as error:
            return str(error)
        if isinstance(outcome, Completed):
            if expected is None or outcome.value == expected:
                return None
            return f"its child has another device, {outcome.value} instead of {expected}"
        said = getattr(outcome, "detail", "") or getattr(outcome, "message", "")
    return f"it does not answer: {said}"
