"""Are the prebuilt modules that a run will load those that were built, and for this machine?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.prebuild import manifest as manifests
from autotune.prebuild.errors import PrebuildError
from autotune.prebuild.install import aot_folder, fits, tvm_ffi_version
from autotune.routes.flashinfer import installed
from autotune.routes.flashinfer.library import LibraryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.prebuild.manifest import Manifest
    from autotune.routes.base import Route


# Names in a line.
SHOWN = 3


def unfit(manifest: Manifest, facts: Facts) -> str | None:
    """Why modules of ``manifest`` cannot run on a device with these facts; None if they can.

    The CUDA runtime that a module links (``libcudart.so.13``) is the one that torch brings: its major release
    must be the toolkit's.
    """
    arch, cuda = facts.hardware.get("compute_capability"), facts.software.get("cuda")
    if arch != manifest.compute_capability:
        return f"built for compute capability {manifest.compute_capability}, and the device here has {arch}"
    if cuda is not None and str(cuda).partition(".")[0] != manifest.cuda.partition(".")[0]:
        return f"built with CUDA {manifest.cuda}, and torch here brings CUDA {cuda}"
    return None


def too_few(manifest: Manifest, loaded: Mapping[str, set[int]]) -> dict[str, str]:
    """Modules that hold no kernel for a head size that they are loaded for, a line each.

    fmha-v2's have one name whatever they hold, and die in an assertion at a size that they do not.

    Args:
        loaded: name -> head sizes (``Wanted.head_dims``).
    """
    lines = {}
    for name, sizes in sorted(loaded.items()):
        held = manifest.modules[name].head_dims if name in manifest.modules else ()
        if held and (lacking := sorted(sizes - set(held))):
            lines[name] = f"{name}: built for head sizes {_joined(held)}, and {_joined(lacking)} is asked for"
    return lines


def _joined(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))


def verify(facts: Facts, columns: Iterable[Column], routes: Mapping[str, Route]) -> None:
    """Refuse modules that are not what the installed manifest says, before anything runs with them.

    Every module of the manifest is hashed (0.1 s for 54). Only if one of them is not right, or may lack a
    head size, is the library asked whether this run, its self-test included, would load that one. A module
    that is not there at all is no matter here: its route says so itself (``Route.available``). Without a
    manifest there is nothing to hold modules against; one that it does not name is :func:`unnamed`'s.

    Raises:
        PrebuildError: the manifest is of another FlashInfer, tvm-ffi, CUDA or device, or a module is not the
            one that was built, or was not built for a head size of this run.
    """
    columns = list(columns)
    package = installed.package(facts)
    folder = None if package is None else aot_folder(package)
    manifest = None if folder is None else manifests.read(folder)
    if package is None or folder is None or manifest is None:
        return
    again = f"remove {folder}, then 'autotune prebuild --out DIR --into {package}' again"
    if reason := fits(manifest, package, tvm_ffi_version()) or unfit(manifest, facts):
        raise PrebuildError(f"prebuilt kernels in {folder}: {reason}; {again}")
    changed = {
        name: line
        for name, line in manifests.problems(folder, manifest).items()
        if manifests.library(folder, name).is_file()
    }
    doubtful = _doubtful(manifest, folder, columns, routes)
    if not (changed or doubtful):
        return
    loaded = _loaded(facts, columns, routes)
    hit = [line for name, line in changed.items() if loaded is None or name in loaded]
    if hit:
        more = f" (and {len(hit) - 1} more)" if hit[1:] else ""
        raise PrebuildError(f"prebuilt kernel {hit[0]}{more}; {again}")
    if short := list(too_few(manifest, doubtful if loaded is None else loaded).values()):
        raise PrebuildError(
            f"prebuilt kernel {short[0]}: 'autotune prebuild' for this space too, into the same folder, "
            f"then 'autotune prebuild --out DIR --into {package}'"
        )


def _doubtful(
    manifest: Manifest, folder: Path, columns: Iterable[Column], routes: Mapping[str, Route]
) -> dict[str, set[int]]:
    """Modules that are here and lack a head size of this run, which may not be theirs to have."""
    sizes = {column.shape.head_dim for column in columns}
    return {
        name: sizes
        for name, module in manifest.modules.items()
        if module.head_dims
        and not sizes <= set(module.head_dims)
        and any(route in routes for route in module.routes)
        and manifests.library(folder, name).is_file()
    }


def _loaded(
    facts: Facts, columns: Iterable[Column], routes: Mapping[str, Route]
) -> dict[str, set[int]] | None:
    """Modules that a run loads, each with its head sizes; None where the library does not say all of them."""
    from autotune.prebuild.wanted import wanted

    try:
        found = wanted(facts, columns, routes)
    except LibraryError:
        return None
    return None if found.refused else found.head_dims


def unnamed(facts: Facts) -> str | None:
    """One line for built modules that no manifest names; None if there are none, or no manifest to name them.

    FlashInfer loads whatever lies there under a module's name, and nothing says what these were built from.
    They are not refused: FlashInfer's own builds have no manifest, and what runs is proven as it is.
    """
    package = installed.package(facts)
    folder = None if package is None else aot_folder(package)
    manifest = None if folder is None else manifests.read(folder)
    if folder is None or manifest is None:
        return None
    found = sorted(set(manifests.present(folder)) - set(manifest.modules))
    if not found:
        return None
    names = ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if found[SHOWN:] else "")
    return (
        f"{folder}: in no manifest, so nothing says what they were built from, and a run may load them: "
        f"{names}; remove their folders, or prebuild them too"
    )


def require_selftest(facts: Facts) -> None:
    """Refuse a self-test whose real kernel cannot be loaded: it would end as a control that failed.

    Raises:
        PrebuildError: XQA's module is not built and cannot be compiled here.
    """
    if facts.device != "cuda" or not facts.software.get("flashinfer"):
        return
    from autotune.routes.flashinfer.xqa import XqaDecode
    from autotune.routes.planted_xqa import COLUMN

    route = XqaDecode()
    if route.supports(COLUMN, facts) is None and (reason := route.available(COLUMN, facts)):
        raise PrebuildError(f"the self-test runs XQA on the device, and {reason}")
