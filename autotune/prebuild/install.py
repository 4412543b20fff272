"""Put a folder of prebuilt modules where an installed FlashInfer looks for them; no compiler needed."""

from __future__ import annotations

import importlib.util
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


def install(folder: Path, package: Path | None = None) -> list[str]:
    """Copy every module of ``folder`` into ``<flashinfer>/data/aot``; returns the names copied.

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
