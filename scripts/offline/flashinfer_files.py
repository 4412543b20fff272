"""Which files of FlashInfer are needed where kernels are loaded and not compiled.

Its Python and JSON, and of ``data/csrc`` what module *naming* reads: the small files directly in it, and the
folders ``xqa`` and ``fmha_v2``. Headers, CUTLASS and large sources stay out: such a copy names every module
and compiles none.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Sources that FlashInfer reads to name a module are small and lie at the top; the rest is for its compiler.
SOURCE_BYTES = 120_000
SOURCE_FOLDERS = ("data/csrc/xqa/", "data/csrc/fmha_v2/")
META = ("METADATA", "WHEEL", "top_level.txt")


class PackError(Exception):
    """One line: what is wrong, where, what to do."""


def wanted(name: str, size: int) -> bool:
    """Whether the file ``name``, as a wheel or site-packages names it, travels."""
    package, _, inner = name.partition("/")
    if package.startswith("flashinfer_python-") and package.endswith(".dist-info"):
        return inner in META
    if package != "flashinfer" or "__pycache__" in name or inner.startswith("data/aot/"):
        return False
    if name.endswith((".py", ".json")) or inner.startswith(SOURCE_FOLDERS):
        return True
    return PurePosixPath(inner).parent == PurePosixPath("data/csrc") and size <= SOURCE_BYTES


def files(source: Path) -> Iterator[tuple[str, bytes]]:
    """The files of FlashInfer that travel, by name, in the order of their names.

    Args:
        source: its wheel, a site-packages folder that has it, or a tar of either.

    Raises:
        PackError: it holds no FlashInfer.
    """
    found = False
    for name, data in _all(source):
        found = found or name == "flashinfer/__init__.py"
        yield name, data
    if not found:
        raise PackError(f"{source} holds no flashinfer/__init__.py: give FlashInfer's wheel")


def _all(source: Path) -> Iterator[tuple[str, bytes]]:
    if source.is_dir():
        tops = [source / "flashinfer", *source.glob("flashinfer_python-*.dist-info")]
        for path in sorted(path for top in tops for path in top.rglob("*") if path.is_file()):
            name = path.relative_to(source).as_posix()
            if wanted(name, path.stat().st_size):
                yield name, path.read_bytes()
    elif zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as wheel:
            for info in sorted(wheel.infolist(), key=lambda info: info.filename):
                if not info.is_dir() and wanted(info.filename, info.file_size):
                    yield info.filename, wheel.read(info)
    else:
        try:
            with tarfile.open(source) as tar:
                for member in tar:
                    file = tar.extractfile(member) if member.isfile() else None
                    if file is not None and wanted(member.name, member.size):
                        yield member.name, file.read()
        except (OSError, tarfile.TarError) as error:
            raise PackError(f"{source} is neither a wheel, a folder nor a tar: {error}") from error
