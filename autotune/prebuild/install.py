"""Put a folder of prebuilt modules where an installed FlashInfer looks for them; no compiler needed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
from pathlib import Path

from autotune.prebuild import manifest as manifests
from autotune.prebuild.errors import PrebuildError


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
    meta = package / "_build_meta.py"
    for line in meta.read_text().splitlines() if meta.is_file() else []:
        name, _, value = line.partition("=")
        if name.strip() == "__version__":
            return value.strip().strip("\"'")
    return ""


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


def install(folder: Path, package: Path | None = None, ffi: str | None = None) -> list[str]:
    """Copy every module of ``folder`` into ``<flashinfer>/data/aot``; returns the names copied.

    Args:
        package: the ``flashinfer`` package folder; the installed one if None.
        ffi: version of apache-tvm-ffi on the host; the installed one if None.

    Raises:
        PrebuildError: no manifest, a module is missing or changed, or another version is installed.
    """
    manifest = manifests.read(folder)
    if manifest is None:
        raise PrebuildError(f"{folder} has no {manifests.NAME}: give a folder that 'autotune prebuild' wrote")
    if wrong := manifests.problems(folder, manifest):
        raise PrebuildError(f"{folder}: {wrong[0]}" + (f" (and {len(wrong) - 1} more)" if wrong[1:] else ""))
    package = package or package_folder()
    version = installed_version(package)
    if version != manifest.flashinfer:
        raise PrebuildError(
            f"{folder} was built for FlashInfer {manifest.flashinfer}, and {version or 'an unknown version'} "
            "is installed: install that version or prebuild again"
        )
    ffi = tvm_ffi_version() if ffi is None else ffi
    if release(ffi) < release(manifest.tvm_ffi):
        raise PrebuildError(
            f"{folder} needs apache-tvm-ffi {manifest.tvm_ffi} or later, and {ffi or 'none'} is installed"
        )
    copied = []
    for name, module in sorted(manifest.modules.items()):
        target = manifests.library(package / "data" / "aot", name)
        if target.is_file() and manifests.digest(target) == module.sha256:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        shutil.copyfile(manifests.library(folder, name), partial)
        partial.replace(target)
        copied.append(name)
    return copied
