"""The hardware and software identity that a verdict and a table are bound to.

Safety and speed bind to every key listed here: a table whose facts differ in any of them answers
nothing but the fallback. Which facts a device kind has is fixed, so a table cannot widen its reach by
leaving one out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from autotune.domain.identity import stable_id

Scalar: TypeAlias = "str | int | float | bool | None"

# On CUDA torch is not the kernel, so its version is recorded in ``informative`` only; on the CPU it is.
HARDWARE_KEYS = {
    "cpu": ("name", "cores", "threads", "isa"),
    "cuda": (
        "name",
        "compute_capability",
        "sm_count",
        "memory_gib",
        "l2_mib",
        "power_limit_w",
        "mig",
    ),
}
SOFTWARE_KEYS = {
    "cpu": ("torch", "torch_commit"),
    "cuda": ("flashinfer", "flashinfer_commit", "cubins", "cuda", "driver"),
}

# Where None is knowledge: "not installed". Everywhere else it is "not known".
MAY_BE_ABSENT = frozenset({"flashinfer", "flashinfer_commit", "cubins"})


@dataclass(frozen=True)
class Facts:
    """What ``hardware.collect()`` found, or what a table was measured on.

    ``device`` is ``cpu`` or ``cuda``. ``informative`` facts never decide anything. A fact that could not be
    found out is None.
    """

    device: str
    hardware: Mapping[str, Scalar]
    software: Mapping[str, Scalar]
    informative: Mapping[str, Scalar] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; what ``autotune doctor --json`` prints and ``Router.load(facts=)`` accepts."""
        return {
            "device": self.device,
            "hardware": dict(self.hardware),
            "software": dict(self.software),
            "informative": dict(self.informative),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Facts:
        """Inverse of :meth:`to_dict`; raises ``ValueError`` on a missing or misshapen part."""
        device = data.get("device")
        if device not in HARDWARE_KEYS:
            raise ValueError(f"device must be one of {sorted(HARDWARE_KEYS)}, not {device!r}")
        parts = []
        for name in ("hardware", "software", "informative"):
            part = data.get(name, {})
            if not isinstance(part, Mapping):
                raise ValueError(f"{name} must be a mapping, not {type(part).__name__}")
            parts.append(dict(part))
        return cls(device, *parts)

    @property
    def id(self) -> str:
        """Identity of the binding facts; studies are keyed by it."""
        return stable_id(
            {"device": self.device, "hardware": dict(self.hardware), "software": dict(self.software)}
        )


def unknown(facts: Facts) -> list[str]:
    """Binding facts that are absent or None, as ``hardware.power_limit_w``: with one of them no table opens.

    None says "not installed" of FlashInfer and of its cubins, and of a commit only where FlashInfer itself is
    not installed: an installed one has a commit, known or not.
    """
    found = []
    for name, keys, values in (
        ("hardware", HARDWARE_KEYS, facts.hardware),
        ("software", SOFTWARE_KEYS, facts.software),
    ):
        for key in keys.get(facts.device, ()):
            absent = key in MAY_BE_ABSENT and (key != "flashinfer_commit" or values.get("flashinfer") is None)
            if key not in values or (values[key] is None and not absent):
                found.append(f"{name}.{key}")
    return found


def mismatches(table: Facts, here: Facts) -> list[str]:
    """Every binding fact that is absent or differs, as ``"driver: table 580.1, here 581.0"``; [] if none.

    A fact that either side does not know (:func:`unknown`) is a mismatch, also where neither does: absence
    of knowledge never opens a table. Types count: ``1`` and ``True`` and ``"1"`` are different facts.
    """
    if table.device != here.device:
        return [f"device: table {table.device}, here {here.device}"]
    found = []
    not_in_table, not_here = set(unknown(table)), set(unknown(here))
    for name, keys, wanted, seen in (
        ("hardware", HARDWARE_KEYS, table.hardware, here.hardware),
        ("software", SOFTWARE_KEYS, table.software, here.software),
    ):
        if table.device not in keys:
            return [f"device: {table.device!r} is unknown"]
        for key in keys[table.device]:
            fact = f"{name}.{key}"
            if fact in not_in_table:
                found.append(f"{fact}: not known in the table{' nor here' if fact in not_here else ''}")
            elif fact in not_here:
                found.append(f"{fact}: not known here")
            elif wanted[key] != seen[key] or type(wanted[key]) is not type(seen[key]):
                found.append(f"{name}.{key}: table {wanted[key]!r}, here {seen[key]!r}")
        foreign = sorted(set(wanted) - set(keys[table.device]))
        found += [f"{name}.{key}: unknown fact in the table" for key in foreign]
    return found
