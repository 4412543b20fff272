"""Which devices a search space is for: exact names and a compute capability."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.domain.fingerprint import Facts

_CAPABILITY = re.compile(r"([1-9]\d*)\.(\d)")


def architecture_of(compute_capability: str) -> str:
    """``"9.0"`` -> ``"sm90"``; raises ``ValueError`` on anything else than major.minor."""
    found = _CAPABILITY.fullmatch(compute_capability)
    if found is None:
        raise ValueError(f'must be major.minor, such as "9.0", not {compute_capability!r}')
    return f"sm{found[1]}{found[2]}"


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The devices that ``--gpu NAME`` accepts.

    Attributes:
        name: the profile's name on the command line, such as ``h200``.
        kind: ``cpu`` or ``cuda``.
        names: exact torch device names; () for the CPU, where any will do.
        compute_capability: ``"9.0"``; "" for the CPU.
        sm_count: counts of streaming multiprocessors seen on such devices; informative.
        memory_gib: assumed where the device is not at hand, in GiB; 0 if unknown.
    """

    name: str
    kind: str
    names: tuple[str, ...] = ()
    compute_capability: str = ""
    sm_count: tuple[int, ...] = ()
    memory_gib: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda"):
            raise ValueError(f"kind must be cpu or cuda, not {self.kind!r}")
        if self.kind == "cuda":
            architecture_of(self.compute_capability)
            if not self.names:
                raise ValueError("a CUDA profile needs device names")

    @property
    def architecture(self) -> str:
        """``cpu``, or ``sm90`` and the like: what an engine file keys its routes by."""
        return "cpu" if self.kind == "cpu" else architecture_of(self.compute_capability)

    def matches(self, facts: Facts) -> bool:
        """Equal kind, exact name, equal compute capability. ``H20`` is not ``H200``."""
        if facts.device != self.kind:
            return False
        if self.kind == "cpu":
            return True
        return (
            facts.hardware.get("name") in self.names
            and facts.hardware.get("compute_capability") == self.compute_capability
        )

    def to_dict(self) -> dict[str, Any]:
        """What identifies the device; the informative numbers are left out."""
        return {
            "kind": self.kind,
            "names": sorted(self.names),
            "compute_capability": self.compute_capability,
        }

    def __str__(self) -> str:
        if self.kind == "cpu":
            return "a CPU"
        return f"{' or '.join(self.names)} (compute capability {self.compute_capability})"
