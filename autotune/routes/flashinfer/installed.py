"""Whether a route's modules are here: the optional ``available`` of a route, shared by this package's.

``supports`` answers from facts, on any machine. This looks at the installation, in a process that must not
import FlashInfer: it asks another one (``library``), and only where a missing module cannot be compiled.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.hardware import flashinfer
from autotune.hardware.collect import has_nvidia_device
from autotune.routes.flashinfer.compiler import lacking
from autotune.routes.flashinfer.library import LibraryError, library

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts


def package(facts: Facts) -> Path | None:
    """The installed FlashInfer that ``facts`` are about; None if there is none, or it is not that.

    Stored facts may be of another machine, which has another version or the GPU that this one lacks: what is
    installed here says nothing about it.
    """
    wanted = facts.software.get("flashinfer")
    if facts.device != "cuda" or not wanted or not has_nvidia_device():
        return None
    found = flashinfer.package_folder("flashinfer")
    if found is None:
        return None
    return found if _version(found) == wanted else None


@cache
def _version(where: Path) -> object:
    """Version of the FlashInfer at ``where``, read once: its files do not change under a run."""
    return flashinfer.flashinfer_facts()["flashinfer"]


@cache
def _profile(name: object, arch: object) -> str:
    """The ``--gpu`` profile of a device, for a command that is shown."""
    from autotune.domain.fingerprint import Facts
    from autotune.space.library import profiles
    from autotune.space.space import load_profile

    facts = Facts("cuda", {"name": name, "compute_capability": arch}, {})  # type: ignore[dict-item]
    return next((each for each in profiles() if load_profile(each).device.matches(facts)), "PROFILE")


def remedy(profile: str, where: Path) -> str:
    """The two commands that put missing modules into the FlashInfer at ``where``."""
    return (
        f"autotune prebuild --gpu {profile} --out DIR where there is a compiler, "
        f"then autotune prebuild --out DIR --into {where} here"
    )


def no_cubins(version: object) -> str:
    """What is said where precompiled kernels are not here."""
    return f"its precompiled kernels are not here: pip install flashinfer-cubin=={version}"


def missing(route: str, column: Column, facts: Facts, *, precompiled: bool = False) -> str | None:
    """Why ``route`` cannot load its kernels for ``column`` here, in one line; None if it can, or may.

    Args:
        precompiled: the route's kernels are downloaded, not compiled.
    """
    where = package(facts)
    if where is None:
        return None
    if precompiled and facts.software.get("cubins") is None:
        return no_cubins(facts.software.get("flashinfer"))
    why = lacking(where)
    if why is None:
        return None
    try:
        modules = library(str(facts.hardware["compute_capability"])).modules(route, column)
    except LibraryError as error:
        # one that cannot name a module may still run: the proof will tell
        return str(error) if error.unusable else None
    absent = [name for name, path in modules.items() if path is None or not Path(path).is_file()]
    if not absent:
        return None
    name, arch = facts.hardware.get("name"), facts.hardware["compute_capability"]
    return (
        f"module {absent[0]} is not built and cannot be compiled here ({why}): "
        f"{remedy(_profile(name, arch), where)}"
    )


class Installed:
    """A route that can say whether its modules are here.

    Attributes:
        precompiled: its kernels are cubins that FlashInfer downloads or that a package brings.
    """

    name: str
    precompiled = False

    def available(self, column: Column, facts: Facts) -> str | None:
        """None if the kernels for ``column`` can be loaded here, else why not. Imports no FlashInfer."""
        return missing(self.name, column, facts, precompiled=self.precompiled)
