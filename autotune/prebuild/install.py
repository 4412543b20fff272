"""Put a folder of prebuilt modules where an installed FlashInfer looks for them; no compiler needed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from autotune.hardware.flashinfer import build_meta
from autotune.prebuild import manifest as manifests
from autotune.prebuild.errors import PrebuildError
from autotune.prebuild.manifest import Manifest
from autotune.prebuild.merge import merge


def package_folder() -> Path:
    """The installed FlashInfer, found without importing it.

    Raises:
        PrebuildError: it is not installed.
    """
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.origin:
        raise PrebuildError("FlashInfer is not installed here: pip install flashinfer-python")
    return Path(spec.origin).parent


def installed_version(package: Path) -> str:
    """The version of the FlashInfer in ``package``; "" if it does not say."""
    return build_meta(package).get("__version__", "")


def installed_commit(package: Path) -> str:
    """The commit of the FlashInfer in ``package``, as its build wrote it; "" if it does not say."""
    meta = build_meta(package)
    commit = meta.get("__git_commit__") or meta.get("__git_version__") or ""
    return "" if commit == "unknown" else commit


def tvm_ffi_version() -> str:
    """The installed apache-tvm-ffi; "" without one."""
    try:
        return importlib.metadata.version("apache-tvm-ffi")
    except importlib.metadata.PackageNotFoundError:
        return ""


def release(version: str) -> tuple[int, ...]:
    """``"0.1.15.post2"`` -> (0, 1, 15); () for "". Compares as releases do."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def aot_folder(package: Path) -> Path | None:
    """Where the FlashInfer in ``package`` looks for built modules first: its own ``data/aot``.

    (jit/env.py of 0.6.18.post1 and 0.7.2.) None for a 0.6 beside flashinfer-jit-cache: it looks only there.
    """
    version = release(installed_version(package))
    if version < (0, 7) and importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    return package / "data" / "aot"


def fits(manifest: Manifest, package: Path, ffi: str) -> str | None:
    """Why modules of ``manifest`` cannot be loaded by the FlashInfer in ``package``; None if they can.

    The modules bind tvm-ffi's C interface, not torch's: torch's version does not count.

    Args:
        ffi: the installed version of apache-tvm-ffi.
    """
    version, commit = installed_version(package), installed_commit(package)
    if version != manifest.flashinfer:
        return (
            f"built for FlashInfer {manifest.flashinfer}, and {version or 'an unknown version'} is "
            "installed: install that version or prebuild again"
        )
    if commit and manifest.flashinfer_commit not in ("", "unknown", commit):
        return (
            f"built for commit {manifest.flashinfer_commit[:12]} of FlashInfer {version}, and {commit[:12]} "
            "is installed: install that build or prebuild again"
        )
    if release(ffi) < release(manifest.tvm_ffi):
        return f"needs apache-tvm-ffi {manifest.tvm_ffi} or later, and {ffi or 'none'} is installed"
    return None


def install(folder: Path, package: Path | None = None, ffi: str | None = None) -> list[str]:
    """Copy every module of ``folder`` to where FlashInfer looks, with its manifest; returns the names copied.

    Several folders may be installed one after the other: the installed manifest holds all their modules.

    Args:
        package: the ``flashinfer`` package folder; the installed one if None.
        ffi: version of apache-tvm-ffi on the host; the installed one if None.

    Raises:
        PrebuildError: no manifest, a module is missing or changed, another version is installed, or modules
            of another build are there already.
    """
    manifest = manifests.require_whole(folder)
    package = package or package_folder()
    if reason := fits(manifest, package, tvm_ffi_version() if ffi is None else ffi):
        raise PrebuildError(f"{folder}: {reason}")
    target = aot_folder(package)
    if target is None:
        raise PrebuildError(
            f"FlashInfer {installed_version(package)} at {package} loads built modules from the package "
            "flashinfer-jit-cache only: uninstall that package, or take FlashInfer 0.7"
        )
    return merge(folder, target)
