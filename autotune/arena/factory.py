"""Opens arenas by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.arena.base import Placement

if TYPE_CHECKING:
    from autotune.arena.base import Arena

# The device kinds each arena serves. An arena's module is imported when it is opened.
KINDS: dict[str, frozenset[str]] = {
    "host_mmap": frozenset({"cpu"}),
    "plain": frozenset({"cpu", "cuda"}),
}
GUARDED = {"cpu": "host_mmap"}


def default_kind(device: str) -> str:
    """The guarded arena of ``device``.

    Raises:
        ValueError: the device has none; a proof must not fall back to unguarded memory by itself.
    """
    kind = device.partition(":")[0]
    if kind not in GUARDED:
        raise ValueError(
            f"no guarded arena for device {device!r}; there is one for {', '.join(sorted(GUARDED))}"
        )
    return GUARDED[kind]


def open_arena(kind: str, device: str, placement: Placement = Placement.TAIL, slack: int = 0) -> Arena:
    """Open an arena of ``kind``.

    Raises:
        ValueError: an unknown kind, or one that does not serve ``device``.
        ArenaError: this machine cannot provide it.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown arena {kind!r}; one of {', '.join(sorted(KINDS))}")
    if device.partition(":")[0] not in KINDS[kind]:
        raise ValueError(f"arena {kind} serves {', '.join(sorted(KINDS[kind]))}, not device {device!r}")
    if kind == "plain":
        from autotune.arena.plain import PlainArena

        return PlainArena(device, placement, slack)
    from autotune.arena.host_mmap import HostMmapArena

    return HostMmapArena(placement, slack)
