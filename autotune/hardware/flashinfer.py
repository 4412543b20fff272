"""Which FlashInfer is installed, found without importing it (its import takes seconds and writes to HOME)."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from autotune.domain.fingerprint import Scalar
from autotune.hardware.cpu import literals

# A source tree on sys.path that was never built: there, and nothing says which one it is.
UNVERSIONED = "0.0.0+unknown"


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


def build_meta(package: Path) -> dict[str, str]:
    """``__version__`` and ``__git_commit__`` of an installed FlashInfer package, as its build wrote them."""
    return literals(package / "_build_meta.py")


def cubin_folder() -> Path:
    """Where FlashInfer reads its cubins, in its own order.

    FLASHINFER_CUBIN_DIR; then the package flashinfer-cubin, if its version is FlashInfer's; then the cache
    (flashinfer/jit/env.py of 0.6.18 and 0.7.2).
    """
    if folder := os.environ.get("FLASHINFER_CUBIN_DIR"):
        return Path(folder)
    library, package = package_folder("flashinfer"), package_folder("flashinfer_cubin")
    if library is not None and package is not None:
        versions = [build_meta(folder).get("__version__") for folder in (library, package)]
        if versions[0] == versions[1] or os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
            return package / "cubins"
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()
    return Path(base) / ".cache" / "flashinfer" / "cubins"


def cubins() -> str | None:
    """16 hex digits over the checksum list of the trtllm-gen attention cubins; None if there are none.

    FlashInfer pins these cubins by a path (``ArtifactPath.TRTLLM_GEN_FMHA``); the list there names every
    kernel's hash, and FlashInfer checks each kernel against it.
    """
    package = package_folder("flashinfer")
    if package is None:
        return None
    pin = _class_literal(package / "artifacts.py", "ArtifactPath", "TRTLLM_GEN_FMHA")
    if pin is None:
        return None
    try:
        checksums = (cubin_folder() / pin / "checksums.txt").read_bytes()
    except OSError:
        return None
    return hashlib.sha256(checksums).hexdigest()[:16]


def flashinfer_facts() -> dict[str, Scalar]:
    """``flashinfer``, ``flashinfer_commit`` and ``cubins`` of ``domain.fingerprint``.

    ``flashinfer`` is None where it is not installed and nowhere else; a commit that is None beside a version
    is not known.
    """
    package = package_folder("flashinfer")
    if package is None:
        return {"flashinfer": None, "flashinfer_commit": None, "cubins": None}
    # the file is what is imported; the distribution's metadata may be of another copy
    meta = build_meta(package)
    version, commit = meta.get("__version__"), meta.get("__git_commit__") or meta.get("__git_version__")
    if version is None:
        try:
            version = importlib.metadata.version("flashinfer-python")
        except importlib.metadata.PackageNotFoundError:
            version = UNVERSIONED
    return {
        "flashinfer": version,
        # a source checkout without git writes "unknown"
        "flashinfer_commit": commit if commit not in (None, "", "unknown") else None,
        "cubins": cubins(),
    }
