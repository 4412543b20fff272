# ruff: noqa: T201 - what it prints is its result
"""Pack everything that `autotune run` needs on a GPU host without a network, into one small file.

    python scripts/offline/pack.py --into offline --flashinfer flashinfer_python-0.7.2-py3-none-any.whl \
        --kernels prebuilt/0.7.2 [--kernels MORE] [--wheels FOLDER] [--database autotune.db] [--limit-mb 64]

writes offline/pack.tar.xz and offline/unpack_and_run.sh. The pack holds

    pack.json     the Python that its wheels are for, FlashInfer's version, what it has of kernels
    wheels/       packages of requirements.txt beside this file (or --wheels)
    bare/         packages of requirements-bare.txt: for a host that has none of that name
    flashinfer/   a trimmed FlashInfer (flashinfer_files.py): it names and loads kernels and compiles none
    kernels/      what `autotune prebuild` built, in one folder with one manifest
    project/      this project's files
    database      --database: a study to go on with

docs/offline-host.md says what to do with it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
# the project may not be installed in this Python: its manifest code needs the standard library only
sys.path.insert(0, str(PROJECT))

import flashinfer_files  # noqa: E402
from flashinfer_files import PackError  # noqa: E402

from autotune.prebuild import manifest as manifests  # noqa: E402
from autotune.prebuild.errors import PrebuildError  # noqa: E402
from autotune.prebuild.merge import merge  # noqa: E402

# What pip's platform tags call a Linux host of the last years: pip matches each exactly.
PLATFORMS = (
    *(f"manylinux_2_{minor}" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)),
    "manylinux2014",
    "manylinux2010",
    "manylinux1",
)
LISTS = {"wheels": "requirements.txt", "bare": "requirements-bare.txt"}
LEFT_OUT = {".git", ".venv", "__pycache__"}


def project_files() -> list[Path]:
    """The project's files, as git tracks them, or all of them where this is no checkout.

    Stored evidence stays out: the study to go on with is given by --database.
    """
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
    evidence = PROJECT / "tuned_configs" / "evidence"
    return sorted(path for path in paths if path.is_file() and evidence not in path.parents)


def download(folder: Path, listed: str, python: str, machine: str) -> None:
    """Download one list's wheels for the target.

    Raises:
        PackError: pip did not find them all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--python-version", python, "--implementation", "cp"]
    command += ["-d", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", f"{platform}_{machine}"]
    done = subprocess.run([*command, "-r", str(HERE / listed)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PackError(f"pip could not download the wheels: {last}; give a folder of them with --wheels")


def names_of(listed: str) -> set[str]:
    """Package names of a requirements list, as wheels spell them."""
    lines = (HERE / listed).read_text().splitlines()
    return {normal(line.partition("==")[0]) for line in lines if line and not line.startswith("#")}


def normal(name: str) -> str:
    """``Mako`` and ``apache-tvm-ffi`` as ``mako`` and ``apache_tvm_ffi``."""
    return name.strip().lower().replace("-", "_").replace(".", "_")


def wheels(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, bytes]]:
    """The wheels: of a folder, sorted into the two lists, or downloaded."""
    if options.wheels is not None and not options.wheels.is_dir():
        raise PackError(f"--wheels {options.wheels} is not a folder")
    if options.wheels is None:
        for part, listed in LISTS.items():
            download(scratch / part, listed, options.python, options.machine)
    bare = names_of(LISTS["bare"])
    seen: dict[str, str] = {}
    for path in sorted((options.wheels or scratch).rglob("*.whl")):
        name = normal(path.name.partition("-")[0])
        if name == "flashinfer_python":
            continue  # it goes in trimmed
        if name in seen:
            raise PackError(
                f"{path.parent} holds {seen[name]} and {path.name}: keep one version of each package"
            )
        seen[name] = path.name
        yield f"{'bare' if name in bare else 'wheels'}/{path.name}", path.read_bytes()


def one_folder(folders: list[Path], scratch: Path) -> Path:
    """The folders of prebuilt kernels as one, checked.

    Raises:
        PackError: one of them is not whole, or they do not belong together.
    """
    try:
        for folder in folders:
            manifests.require_whole(folder)
        if len(folders) == 1:
            return folders[0]
        for folder in folders:
            merge(folder, scratch / "kernels")
    except PrebuildError as error:
        raise PackError(f"--kernels: {error}") from error
    return scratch / "kernels"


def version_of(flashinfer: list[tuple[str, bytes]]) -> str:
    """FlashInfer's version, from its build's own file."""
    meta = dict(flashinfer).get("flashinfer/_build_meta.py", b"").decode()
    for line in meta.splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "__version__":
            return value.strip().strip("\"'")
    return ""


def files(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, bytes]]:
    """Every file of the pack, in a fixed order."""
    about: dict[str, object] = {"python": options.python, "machine": options.machine}
    flashinfer = [] if options.flashinfer is None else list(flashinfer_files.files(options.flashinfer))
    about["flashinfer"] = version_of(flashinfer)
    if options.kernels:
        folder = one_folder(options.kernels, scratch)
        manifest = manifests.require_whole(folder)
        if manifest.flashinfer != about["flashinfer"]:
            raise PackError(
                f"--kernels were built for FlashInfer {manifest.flashinfer}, and --flashinfer is "
                f"{about['flashinfer'] or 'not given'}: both must be of one version"
            )
        about["kernels"] = {"modules": len(manifest.modules), "for": manifest.describe()}
    yield "pack.json", (json.dumps(about, indent=1) + "\n").encode()
    yield from wheels(options, scratch)
    for name, data in flashinfer:
        yield f"flashinfer/{name}", data
    if options.kernels:
        yield f"kernels/{manifests.NAME}", (folder / manifests.NAME).read_bytes()
        for name in sorted(manifest.modules):
            path = manifests.library(folder, name)
            yield f"kernels/{path.relative_to(folder).as_posix()}", path.read_bytes()
    for path in project_files():
        yield f"project/{path.relative_to(PROJECT).as_posix()}", path.read_bytes()
    if options.database is not None:
        if not options.database.is_file():
            raise PackError(f"--database {options.database} does not exist")
        yield "database", options.database.read_bytes()


def write(target: Path, content: Iterable[tuple[str, bytes]]) -> dict[str, tuple[int, int]]:
    """Write the pack; files and bytes before compression by top folder. Equal content gives an equal file."""
    sizes: dict[str, tuple[int, int]] = {}
    # 9: its 64 MiB dictionary sees how much the kernels have in common
    with tarfile.open(target, "w:xz", preset=9) as tar:
        for name, data in content:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
            top = name.partition("/")[0]
            count, size = sizes.get(top, (0, 0))
            sizes[top] = (count + 1, size + len(data))
    return sizes


def main() -> int:
    """Pack, and say what went in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="folder that gets pack and script")
    parser.add_argument(
        "--flashinfer", type=Path, help="FlashInfer's wheel, a site-packages folder that has it, or a tar"
    )
    parser.add_argument(
        "--kernels", type=Path, action="append", help="folder that 'autotune prebuild' wrote; may be repeated"
    )
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
    for top, (count, size) in sizes.items():
        print(f"{size / 1e6:8.1f} MB  {top} ({count} files)")
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
