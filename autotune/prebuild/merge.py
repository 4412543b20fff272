"""One folder of modules out of several: what an installation and a pack hold."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from autotune.prebuild import manifest as manifests
from autotune.prebuild.errors import PrebuildError
from autotune.prebuild.manifest import Module


def merge(source: Path, target: Path) -> list[str]:
    """Copy what ``target`` lacks of the modules in ``source``; its manifest then has them all.

    A module that both hold, built from the same recipe, stays as it is. Of two that hold different head sizes
    under one name (fmha-v2) the one with more stays. The manifest is written after each copy, so an
    interrupted merge goes on where it stopped.

    Returns:
        Names of the modules copied.

    Raises:
        PrebuildError: ``source`` is not whole, or the two were built for different libraries or devices, or
            hold modules of one name of which neither serves for both.
    """
    new, kept = manifests.require_whole(source), manifests.read(target)
    kept = replace(new, modules={}) if kept is None else kept
    if kept.build_of() != new.build_of():
        raise PrebuildError(
            f"{target} holds modules of {kept.describe()}; {source} has those of {new.describe()}: "
            f"remove {target} first, or give another folder"
        )
    copied = []
    for name, module in sorted(new.modules.items()):
        if not manifests.problems(target, kept, [name]):
            have = kept.modules[name]
            if _serves(have, module):
                continue
            if not _serves(module, have):
                raise PrebuildError(
                    f"{name}: {target} has it for head sizes {_sizes(have)}, {source} for {_sizes(module)}: "
                    "prebuild both spaces into one folder"
                )
        _copy(manifests.library(source, name), manifests.library(target, name))
        kept.modules[name] = module
        kept.write(target)
        copied.append(name)
    return copied


def _serves(have: Module, wanted: Module) -> bool:
    """Whether ``have`` can stand for ``wanted``: the same sources, or more head sizes of them."""
    same = have.sha256 == wanted.sha256 or have.recipe == wanted.recipe
    return same or (bool(wanted.head_dims) and set(have.head_dims) > set(wanted.head_dims))


def _sizes(module: Module) -> str:
    return ", ".join(str(size) for size in module.head_dims) or "of another recipe"


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    try:
        shutil.copyfile(source, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
