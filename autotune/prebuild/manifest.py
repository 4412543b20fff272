"""``manifest.json`` of a folder of prebuilt modules: what each is, and for which library it was built."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune.prebuild.errors import PrebuildError

SCHEMA = "autotune/prebuilt-kernels/1"
NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Module:
    """One built module.

    Attributes:
        sha256: of the shared object.
        recipe: digest of what it was built from; another recipe under the same name is another module
            (fmha-v2 keeps one name whatever head sizes it holds).
        head_dims: the only head sizes it holds; () where the name says so.
    """

    name: str
    sha256: str
    bytes: int
    seconds: float
    recipe: str
    routes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()


@dataclass(slots=True)
class Manifest:
    """Versions that every module of the folder shares, and the modules by name.

    Attributes:
        tvm_ffi: of the headers; modules need this version or a later one at run time.
        cuda: the toolkit's release.
    """

    flashinfer: str
    flashinfer_commit: str
    tvm_ffi: str
    cuda: str
    compute_capability: str
    modules: dict[str, Module] = field(default_factory=dict)

    def build_of(self) -> tuple[str, ...]:
        """What must be equal for two modules to share a folder."""
        return (self.flashinfer, self.flashinfer_commit, self.tvm_ffi, self.cuda, self.compute_capability)

    def describe(self) -> str:
        """The same in words, for a line that says why two do not fit."""
        commit = f" ({self.flashinfer_commit[:12]})" if self.flashinfer_commit else ""
        return (
            f"FlashInfer {self.flashinfer}{commit}, apache-tvm-ffi {self.tvm_ffi or 'unknown'}, "
            f"CUDA {self.cuda}, compute capability {self.compute_capability}"
        )

    def write(self, folder: Path) -> None:
        """Atomically, modules in name order."""
        data = {"schema": SCHEMA, **asdict(self)}
        data["modules"] = [asdict(self.modules[name]) for name in sorted(self.modules)]
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{NAME}.{os.getpid()}"
        partial.write_text(json.dumps(data, indent=1) + "\n")
        partial.replace(folder / NAME)


def read(folder: Path) -> Manifest | None:
    """The folder's manifest; None if it has none.

    Raises:
        PrebuildError: it is not a manifest that this version reads.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        if data.pop("schema") != SCHEMA:
            raise ValueError("schema")
        modules = {
            entry["name"]: Module(
                **{
                    **entry,
                    "routes": tuple(entry["routes"]),
                    "head_dims": tuple(entry["head_dims"]),
                }
            )
            for entry in data.pop("modules")
        }
        return Manifest(**data, modules=modules)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PrebuildError(
            f"{path} is not a manifest of schema {SCHEMA} ({error}): remove the folder and prebuild again"
        ) from error


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        sha = hashlib.sha256()
        while chunk := file.read(1 << 20):
            sha.update(chunk)
    return sha.hexdigest()


def library(folder: Path, name: str) -> Path:
    """Where ``data/aot`` keeps a module."""
    return folder / name / f"{name}.so"


def present(folder: Path) -> list[str]:
    """Names of the modules that lie in the folder, in order, whether a manifest names them or not."""
    return sorted(path.stem for path in folder.glob("*/*.so") if path == library(folder, path.stem))


def problems(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> dict[str, str]:
    """What is wrong with modules of the folder, a line each; {} if every one is there and unchanged.

    Args:
        names: the modules to look at; all of the manifest's if None.
    """
    found = {}
    for name in sorted(manifest.modules) if names is None else sorted(names):
        module, path = manifest.modules.get(name), library(folder, name)
        if module is None:
            found[name] = f"{name}: not built"
        elif not path.is_file():
            found[name] = f"{name}: in the manifest, but {path} is missing"
        elif digest(path) != module.sha256:
            found[name] = f"{name}: {path} is not the file that was built"
    return found


def require_whole(folder: Path) -> Manifest:
    """The manifest of a folder that ``prebuild`` wrote, each module checked against it.

    Raises:
        PrebuildError: there is none, or a module is missing or changed.
    """
    manifest = read(folder)
    if manifest is None:
        raise PrebuildError(f"{folder} has no {NAME}: give a folder that 'autotune prebuild' wrote")
    if wrong := list(problems(folder, manifest).values()):
        raise PrebuildError(f"{folder}: {wrong[0]}" + (f" (and {len(wrong) - 1} more)" if wrong[1:] else ""))
    return manifest
