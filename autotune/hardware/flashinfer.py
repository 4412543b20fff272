"""Which FlashInfer is installed, found without importing it (its import takes seconds and writes to HOME)."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from autotune.domain.fingerprint import Scalar
from autotune.hardware.cpu import literals


def package_folder(name: str) -> Path | None:
    """Folder of an installed top-level package; None if there is none."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


def _class_literal(path: Path, owner: str, name: str) -> str | None:
    """The string that class ``owner`` of a Python file assigns to ``name``; None if it does not."""
    import ast

    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for item in node.body:
                if (
                    isinstance(item, ast.AnnAssign)
                    and isinstance(item.target, ast.Name)
                    and item.target.id == name
                    and isinstance(item.value, ast.Constant)
                    and isinstance(item.value.value, str)
                ):
                    return item.value.value
    return None


def cubin_folder() -> Path | None:
    """Where FlashInfer takes its cubins from: FLASHINFER_CUBIN_DIR, then the package flashinfer-cubin."""
    if folder := os.environ.get("FLASHINFER_CUBIN_DIR"):
        return Path(folder)
    package = package_folder("flashinfer_cubin")
    return package / "cubins" if package else None


def cubins() -> str | None:
    """16 hex digits over the checksum list of the trtllm-gen attention cubins; None if there are none.

    FlashInfer pins these cubins by a path (``ArtifactPath.TRTLLM_GEN_FMHA``); the list there names every
    kernel's hash. Where the pin cannot be read, every checksum list in the folder counts.
    """
    folder, package = cubin_folder(), package_folder("flashinfer")
    if folder is None or package is None:
        return None
    pin = _class_literal(package / "artifacts.py", "ArtifactPath", "TRTLLM_GEN_FMHA")
    lists = [folder / pin / "checksums.txt"] if pin else sorted(folder.rglob("checksums.txt"))
    digest = hashlib.sha256()
    found = False
    for path in lists:
        try:
            digest.update(path.read_bytes())
        except OSError:
            continue
        found = True
    return digest.hexdigest()[:16] if found else None


def flashinfer_facts() -> dict[str, Scalar]:
    """``flashinfer``, ``flashinfer_commit`` and ``cubins`` of ``domain.fingerprint``; None where unknown."""
    package = package_folder("flashinfer")
    if package is None:
        return {"flashinfer": None, "flashinfer_commit": None, "cubins": None}
    # the file is what is imported; the distribution's metadata may be of another copy
    meta = {**literals(package / "_version.py"), **literals(package / "_build_meta.py")}
    version = meta.get("__version__")
    if version is None:
        try:
            version = importlib.metadata.version("flashinfer-python")
        except importlib.metadata.PackageNotFoundError:
            version = None
    return {
        "flashinfer": version,
        "flashinfer_commit": meta.get("__git_version__") or meta.get("git_version"),
        "cubins": cubins(),
    }
