"""Ties a child to one device of several, before anything in it has looked for devices.

On CUDA the child is shown that device alone: to everything in it (routes, arenas, libraries that say
``cuda:0``, NVML by address) it is the one device that there is, and no context of ours can end up on another.
So a job says ``cuda``, whichever GPU its child is tied to. On the CPU the child keeps to one core.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def pin(device: str, environ: MutableMapping[str, str] | None = None) -> None:
    """Tie this process to ``device``; ``cpu`` and ``cuda`` tie it to nothing.

    Args:
        device: ``cuda:1`` is the second of those that CUDA shows the parent, ``cpu:1`` the second core that
            this process may use.
        environ: this process's environment if None.

    Raises:
        ValueError: there is no such device.
    """
    kind, colon, index = device.partition(":")
    if not colon:
        return
    if kind == "cuda":
        where = os.environ if environ is None else environ
        where[VISIBLE] = visible(int(index), where.get(VISIBLE))
    elif hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if int(index) >= len(cores):
            raise ValueError(f"no core {index}: this process may use {len(cores)}")
        os.sched_setaffinity(0, {cores[int(index)]})


def visible(index: int, listed: str | None) -> str:
    """What ``CUDA_VISIBLE_DEVICES`` must say to show CUDA's device ``index`` alone.

    Args:
        listed: what it says now: numbers, ``GPU-`` or ``MIG-`` names; None: nothing, all are shown.

    Raises:
        ValueError: it lists no such device.
    """
    if listed is None:
        return str(index)
    names = [name.strip() for name in listed.split(",")]
    if index >= len(names) or not names[index]:
        raise ValueError(f"no device cuda:{index}: {VISIBLE} is {listed!r}")
    return names[index]
