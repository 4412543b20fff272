"""Pack an installed FlashInfer without what prebuilt modules make unnecessary, for an offline host.

    python scripts/trim_flashinfer.py SITE_PACKAGES flashinfer-0.7.2-trimmed.tar.xz

keeps its Python and JSON files, and of ``data/csrc`` what module *naming* reads: the files directly in it up
to 120 kB, and the folders ``xqa`` and ``fmha_v2``. Headers, CUTLASS and large sources are left out, so such a
copy names every module and compiles none: install prebuilt modules into its ``data/aot``. Unpack into any
folder on ``sys.path``. ``apache-tvm-ffi`` is still needed beside it.
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

SMALL = 120_000
FOLDERS = ("data/csrc/xqa/", "data/csrc/fmha_v2/")


def wanted(relative: str, size: int) -> bool:
    """Whether a file of the package, by its path inside it, travels."""
    if "__pycache__" in relative or relative.startswith("data/aot/"):
        return False
    if relative.endswith((".py", ".json", "py.typed")) or relative.startswith(FOLDERS):
        return True
    return relative.startswith("data/csrc/") and relative.count("/") == 2 and size <= SMALL


def main(site: Path, target: Path) -> str:
    """Write the archive; returns what was done, in one line. Exits with a message without FlashInfer."""
    package = site / "flashinfer"
    if not (package / "__init__.py").is_file():
        sys.exit(f"{site} holds no flashinfer: give the site-packages folder that does")
    files = [
        path
        for path in sorted(package.rglob("*"))
        if path.is_file() and wanted(path.relative_to(package).as_posix(), path.stat().st_size)
    ]
    info = sorted(site.glob("flashinfer_python-*.dist-info/*"))
    files += [path for path in info if path.name in ("METADATA", "WHEEL")]
    target.parent.mkdir(parents=True, exist_ok=True)

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = 0
        return member

    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in files:
            archive.add(path, path.relative_to(site).as_posix(), filter=plain)
    total, packed = sum(path.stat().st_size for path in files), target.stat().st_size
    return f"{target}: {len(files)} files, {total / 1e6:.1f} MB packed to {packed / 1e6:.1f} MB"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.stdout.write(main(Path(sys.argv[1]), Path(sys.argv[2])) + "\n")
