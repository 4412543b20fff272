"""What a run over a space lacks of FlashInfer's kernels: the part of ``autotune doctor`` that names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.cli.doctor_finding import finding

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from autotune.domain.fingerprint import Facts
    from autotune.prebuild.wanted import Wanted
    from autotune.routes.base import Route
    from autotune.space.grid import Grid

# Names in the line; --json has all of them.
SHOWN = 3


def kernel_findings(
    grid: Grid, routes: Mapping[str, Route], engine: str, space: Path | None
) -> list[dict[str, Any]]:
    """Modules, manifest, compiler and precompiled kernels. Quick where FlashInfer is not installed.

    Args:
        engine, space: as on the command line, for the command that builds what is missing.
    """
    from autotune.domain.fingerprint import Facts
    from autotune.hardware.flashinfer import flashinfer_facts, package_folder
    from autotune.prebuild.wanted import wanted
    from autotune.routes.flashinfer.library import LibraryError

    package = package_folder("flashinfer")
    if package is None:
        return []  # said among the packages
    device = grid.space.device
    hardware = {"name": device.names[0], "compute_capability": device.compute_capability}
    facts = Facts("cuda", hardware, flashinfer_facts())
    flags = f"--gpu {grid.space.gpu}" + ("" if engine == "generic" else f" --engine {engine}")
    flags += "" if space is None else f" --space {space}"
    build = f"autotune prebuild {flags} --out DIR"
    install = f"autotune prebuild --out DIR --into {package}"
    try:
        found = wanted(facts, grid.columns, routes)
    except LibraryError as error:
        return [finding("kernels", False, str(error))]
    return [
        _modules(found, build, install),
        *[finding("kernels", None, line) for line in found.refused],
        *_manifest(package, facts, found, build, install),
        *_compiler(package, bool(found.missing)),
        *_cubins(facts, found),
    ]


def _modules(found: Wanted, build: str, install: str) -> dict[str, Any]:
    count, missing = len(found.modules), found.missing
    if not missing:
        return finding("kernels", True, f"all {count} modules of this space are built", missing=[])
    names = ", ".join(missing[:SHOWN]) + (f" and {len(missing) - SHOWN} more" if missing[SHOWN:] else "")
    return finding(
        "kernels",
        False,
        f"{len(missing)} of {count} modules of this space are not built: {names}; "
        f"where there is a compiler: {build}; then here: {install}",
        missing=[{"module": name, "routes": sorted(found.routes[name])} for name in missing],
        commands=[build, install],
    )


def _manifest(package: Path, facts: Facts, found: Wanted, build: str, install: str) -> list[dict[str, Any]]:
    """Whether the modules that are here are those that were built, and for this space."""
    from autotune.prebuild import manifest as manifests
    from autotune.prebuild.errors import PrebuildError
    from autotune.prebuild.install import aot_folder, fits, tvm_ffi_version
    from autotune.prebuild.verify import too_few, unfit

    folder = aot_folder(package)
    if folder is None:
        return []
    try:
        manifest = manifests.read(folder)
    except PrebuildError as error:
        return [finding("kernel manifest", False, str(error))]
    here = [name for name, path in found.modules.items() if path is not None]
    if manifest is None:
        text = f"none in {folder}: what is there cannot be checked"
        return [finding("kernel manifest", None, text)] if here else []
    again = f"remove {folder}, then {install}"
    if reason := fits(manifest, package, tvm_ffi_version()) or unfit(manifest, facts):
        return [finding("kernel manifest", False, f"{folder}: {reason}; {again}")]
    # what is not there at all is said among the modules
    changed = manifests.problems(folder, manifest, [name for name in here if name in manifest.modules])
    if changed:
        lines = list(changed.values())
        more = f" (and {len(lines) - 1} more)" if lines[1:] else ""
        return [finding("kernel manifest", False, f"{lines[0]}{more}; {again}", changed=sorted(changed))]
    if short := too_few(manifest, {name: found.head_dims[name] for name in here}):
        lines = list(short.values())
        more = f" (and {len(lines) - 1} more)" if lines[1:] else ""
        text = f"{lines[0]}{more}; {build} where there is a compiler, DIR as before; then here: {install}"
        return [finding("kernel manifest", False, text, lacking=sorted(short))]
    unlisted = sorted(set(here) - set(manifest.modules))
    tail = f"; {len(unlisted)} modules that are here are not in it" if unlisted else ""
    text = f"{len(here) - len(unlisted)} modules checked, for {manifest.describe()}{tail}"
    return [finding("kernel manifest", True, text, unlisted=unlisted)]


def _compiler(package: Path, needed: bool) -> list[dict[str, Any]]:
    """What compiling a module here would take; missing only where a module is."""
    from autotune.prebuild.toolchain import examine
    from autotune.routes.flashinfer.compiler import headers_lacking

    chain, missing = examine()
    if reason := headers_lacking(package):
        missing = [*missing, f"{reason}: pip install flashinfer-python of this version"]
    if chain is not None and not missing:
        text = f"CUDA {chain.cuda} at {chain.cuda_home}, headers, ninja, C++ compiler, stub driver library"
        return [finding("compiler", True if needed else None, text)]
    return [finding("compiler", False if needed else None, line) for line in missing]


def _cubins(facts: Facts, found: Wanted) -> list[dict[str, Any]]:
    from autotune.routes.flashinfer.installed import no_cubins

    if not found.precompiled:
        return []
    names, cubins = ", ".join(sorted(found.precompiled)), facts.software["cubins"]
    if cubins is None:
        return [finding("cubins", False, f"{names}: {no_cubins(facts.software['flashinfer'])}")]
    return [finding("cubins", True, f"{names}: {cubins}")]
