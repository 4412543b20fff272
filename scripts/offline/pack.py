# ruff: noqa: T201 - what it prints is its result
"""Pack everything that `autotune run` needs on a GPU host without a network, into one small file.

    python scripts/offline/pack.py --into offline --flashinfer flashinfer_python-0.7.2-py3-none-any.whl \
        --kernels prebuilt/0.7.2 [--wheels FOLDER] [--database autotune.db] [--limit-mb 64]

writes offline/pack.tar.xz and offline/unpack_and_run.sh. The pack holds

    wheels/       Python packages that the host lacks (requirements.txt beside this file, or --wheels)
    flashinfer/   a trimmed FlashInfer: every module and template that names and loads kernels, no headers
    kernels/      what `autotune prebuild` built, with its manifest
    project/      this project's files
    database      --database: a study to go on with

docs/offline-host.md says what to do with it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
# What pip's platform tags call a Linux host of the last years: pip matches each exactly.
PLATFORMS = (
    *(f"manylinux_2_{minor}" for minor in (39, 35, 34, 31, 28, 27, 24, 17)),
    "manylinux2014",
    "manylinux1",
)
# Sources that FlashInfer reads to name a module are small and lie at the top; the rest is for its compiler.
SOURCE_BYTES = 120_000
SOURCE_FOLDERS = ("data/csrc/xqa/", "data/csrc/fmha_v2/")
LEFT_OUT = {".git", ".venv", "__pycache__"}


class PackError(Exception):
    """One line: what is wrong, where, what to do."""


def wanted(name: str, size: int) -> bool:
    """Whether a file of FlashInfer's wheel is needed where kernels are loaded, not compiled."""
    package, _, inner = name.partition("/")
    if package.endswith(".dist-info"):
        return inner in ("METADATA", "WHEEL", "top_level.txt")
    if package != "flashinfer" or name.endswith("/"):
        return False
    if name.endswith((".py", ".json")) or inner.startswith(SOURCE_FOLDERS):
        return True
    return PurePosixPath(inner).parent == PurePosixPath("data/csrc") and size <= SOURCE_BYTES


def trimmed(source: Path) -> Iterator[tuple[str, bytes]]:
    """Files of FlashInfer from its wheel, trimmed, or from a tar that was trimmed before.

    Raises:
        PackError: it holds no FlashInfer.
    """
    found = False
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as wheel:
            for info in wheel.infolist():
                if wanted(info.filename, info.file_size):
                    found = found or info.filename == "flashinfer/__init__.py"
                    yield info.filename, wheel.read(info)
    else:
        try:
            with tarfile.open(source) as tar:
                for member in tar:
                    file = tar.extractfile(member) if member.isfile() else None
                    if file is not None:
                        found = found or member.name == "flashinfer/__init__.py"
                        yield member.name, file.read()
        except (OSError, tarfile.TarError) as error:
            raise PackError(f"{source} is neither a wheel nor a tar: {error}") from error
    if not found:
        raise PackError(f"{source} holds no flashinfer/__init__.py: give FlashInfer's wheel")


def project_files() -> list[Path]:
    """The project's files, as git tracks them, or all of them where this is no checkout."""
    listed = subprocess.run(
        ["git", "-C", str(PROJECT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [PROJECT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [path for path in PROJECT.rglob("*") if not LEFT_OUT & set(path.relative_to(PROJECT).parts)]
    return sorted(path for path in paths if path.is_file())


def download(folder: Path, python: str, machine: str) -> None:
    """Download the requirements' wheels for the target.

    Raises:
        PackError: pip did not find them all.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "-d", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", f"{platform}_{machine}"]
    done = subprocess.run(
        [*command, "-r", str(HERE / "requirements.txt")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PackError(f"pip could not download the wheels: {last}; give a folder of them with --wheels")


def files(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, bytes]]:
    """Every file of the pack, in a fixed order."""
    wheels = options.wheels
    if wheels is None:
        wheels = scratch / "wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        download(wheels, options.python, options.machine)
    elif not wheels.is_dir():
        raise PackError(f"--wheels {wheels} is not a folder")
    seen: dict[str, str] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.partition("-")[0].lower()
        if name == "flashinfer_python":
            continue  # it goes in trimmed
        if name in seen:
            raise PackError(f"{wheels} holds {seen[name]} and {wheel.name}: keep one version of each package")
        seen[name] = wheel.name
        yield f"wheels/{wheel.name}", wheel.read_bytes()
    if options.flashinfer is not None:
        for name, data in trimmed(options.flashinfer):
            yield f"flashinfer/{name}", data
    if options.kernels is not None:
        if not (options.kernels / "manifest.json").is_file():
            raise PackError(
                f"--kernels {options.kernels} has no manifest.json: run 'autotune prebuild' first"
            )
        for path in sorted(options.kernels.rglob("*")):
            if path.is_file() and (path.suffix == ".so" or path.name == "manifest.json"):
                yield f"kernels/{path.relative_to(options.kernels).as_posix()}", path.read_bytes()
    for path in project_files():
        yield f"project/{path.relative_to(PROJECT).as_posix()}", path.read_bytes()
    if options.database is not None:
        if not options.database.is_file():
            raise PackError(f"--database {options.database} does not exist")
        yield "database", options.database.read_bytes()


def write(target: Path, content: Iterable[tuple[str, bytes]]) -> dict[str, int]:
    """Write the pack; returns bytes before compression by top folder. Equal content gives an equal file."""
    sizes: dict[str, int] = {}
    with tarfile.open(target, "w:xz") as tar:
        for name, data in content:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
            top = name.partition("/")[0]
            sizes[top] = sizes.get(top, 0) + len(data)
    return sizes


def main() -> int:
    """Pack, and say what went in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="folder that gets pack and script")
    parser.add_argument("--flashinfer", type=Path, help="FlashInfer's wheel, or a tar trimmed by hand")
    parser.add_argument("--kernels", type=Path, help="folder that 'autotune prebuild' wrote")
    parser.add_argument("--wheels", type=Path, help="folder of wheels, instead of downloading them")
    parser.add_argument("--database", type=Path, help="an SQLite study to carry over")
    parser.add_argument("--python", default="3.12", help="the target's Python (default 3.12)")
    parser.add_argument("--machine", default="x86_64", help="the target's uname -m (default x86_64)")
    parser.add_argument("--limit-mb", type=float, default=64.0, help="fail above this size (default 64)")
    options = parser.parse_args()

    options.into.mkdir(parents=True, exist_ok=True)
    target, partial = options.into / "pack.tar.xz", options.into / "pack.tar.xz.partial"
    scratch = options.into / "scratch"
    try:
        sizes = write(partial, files(options, scratch))
    except PackError as error:
        partial.unlink(missing_ok=True)
        print(f"pack: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    megabytes = partial.stat().st_size / 1e6
    for top, size in sizes.items():
        print(f"{size / 1e6:8.1f} MB  {top}")
    if megabytes > options.limit_mb:
        partial.unlink()
        print(f"pack: {megabytes:.1f} MB is more than --limit-mb {options.limit_mb:g}", file=sys.stderr)
        return 1
    partial.replace(target)
    shutil.copyfile(HERE / "unpack_and_run.sh", options.into / "unpack_and_run.sh")
    digest = hashlib.sha256(target.read_bytes()).hexdigest()[:12]
    print(f"{megabytes:8.1f} MB  {target} compressed, sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
