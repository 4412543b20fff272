# ruff: noqa: T201 - what it prints is its result
"""Puts an extracted pack in place. ``unpack_and_run.sh`` runs it with the host's Python:

    python FRESH/project/scripts/offline/unpack.py FRESH INTO

FRESH is what the tar held, and is emptied; INTO gets ``site`` (packages), ``project``, ``kernels`` and, if
the pack has one, ``autotune.db``. Nothing is installed into the host's own Python.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path


class UnpackError(Exception):
    """One line: what is wrong, where, what to do."""


def require_python(about: dict[str, str]) -> None:
    """Refuse a Python that the wheels are not for.

    Raises:
        UnpackError: another version, or another machine.
    """
    here = ".".join(platform.python_version_tuple()[:2])
    if about["python"] != here:
        raise UnpackError(
            f"the pack is for Python {about['python']}, and {sys.executable} is {here}: give another with "
            f"--python, or pack again with pack.py --python {here}"
        )
    if about["machine"] != platform.machine():
        raise UnpackError(
            f"the pack is for {about['machine']}, and this host is {platform.machine()}: pack again with "
            f"pack.py --machine {platform.machine()}"
        )


def host_version(name: str) -> str | None:
    """The version of a package that the host has; None without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def chosen(fresh: Path) -> tuple[list[Path], list[str]]:
    """Wheels to unpack, and the names of those that the host has."""
    take, kept = [], []
    for part in ("wheels", "bare"):
        for wheel in sorted((fresh / part).glob("*.whl")):
            name, version = wheel.name.split("-")[:2]
            here = host_version(name)
            if here == version or (part == "bare" and here is not None):
                kept.append(f"{name} {here}")
            else:
                take.append(wheel)
    return take, kept


def install_wheels(wheels: list[Path], site: Path) -> None:
    """Unpack wheels into a folder of their own.

    Raises:
        UnpackError: pip is not there, or refuses one.
    """
    if not wheels:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--no-compile", "--no-cache-dir", "--no-warn-conflicts", "--upgrade"]
    command += ["--target", str(site), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UnpackError(f"pip could not unpack the wheels: {last}")


def move(source: Path, target: Path) -> bool:
    """Move a part of the pack to its place, if the pack has it."""
    if not source.exists():
        return False
    shutil.move(source, target)
    return True


def unpack(fresh: Path, into: Path) -> list[str]:
    """Everything but the mark that it is done; returns what to say, a line each.

    Raises:
        UnpackError, PrebuildError: see there; nothing runs then, and the next call tries again.
    """
    about = json.loads((fresh / "pack.json").read_text())
    require_python(about)
    said = []
    take, kept = chosen(fresh)
    site = into / "site"
    if not move(fresh / "flashinfer", site):
        site.mkdir()
    install_wheels(take, site)
    said.append(f"{len(take)} packages unpacked" + (f"; the host's own: {', '.join(kept)}" if kept else ""))
    move(fresh / "project", into / "project")
    if move(fresh / "kernels", into / "kernels"):
        sys.path[:0] = [str(into / "project"), str(site)]
        importlib.invalidate_caches()
        from autotune.prebuild.install import install

        copied = install(into / "kernels", site / "flashinfer")
        said.append(f"{len(copied)} prebuilt kernels are in place, for {about['kernels']['for']}")
    # last: a call that failed before this leaves the host's own study where it was
    if move(fresh / "database", into / "autotune.db.new"):
        database = into / "autotune.db"
        if database.exists():
            database.replace(into / "autotune.db.before")
        for suffix in ("-wal", "-shm"):
            (into / f"autotune.db{suffix}").unlink(missing_ok=True)
        (into / "autotune.db.new").replace(database)
    return said


def main() -> int:
    """Exit 1 with one line where it cannot be done."""
    try:
        for line in unpack(Path(sys.argv[1]), Path(sys.argv[2])):
            print(f"unpack_and_run: {line}", file=sys.stderr)
    except (UnpackError, ValueError, OSError) as error:
        print(f"unpack_and_run: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if type(error).__name__ != "PrebuildError":  # its module is in the pack
            raise
        print(f"unpack_and_run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
