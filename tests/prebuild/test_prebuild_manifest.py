"""The manifest of a folder of modules, and installing such a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.prebuild import manifest as manifests
from autotune.prebuild.errors import PrebuildError
from autotune.prebuild.install import install, release
from autotune.prebuild.manifest import Manifest, Module


def folder_of(tmp_path: Path, contents: dict[str, bytes]) -> tuple[Path, Manifest]:
    folder = tmp_path / "kernels"
    manifest = Manifest("0.7.2", "abc", "0.1.11", "13.0", "9.0")
    for name, content in contents.items():
        path = manifests.library(folder, name)
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        manifest.modules[name] = Module(
            name, manifests.digest(path), len(content), 1.5, "recipe", ("xqa-decode",), (128, 256)
        )
    manifest.write(folder)
    return folder, manifest


def test_round_trip(tmp_path: Path) -> None:
    folder, manifest = folder_of(tmp_path, {"b": b"2", "a": b"1"})
    assert manifests.read(folder) == manifest
    assert manifests.read(tmp_path) is None
    assert [path.name for path in folder.glob("manifest*")] == ["manifest.json"]


def test_problems_name_each_module(tmp_path: Path) -> None:
    folder, manifest = folder_of(tmp_path, {"a": b"1", "b": b"2", "c": b"3"})
    assert manifests.problems(folder, manifest) == []
    manifests.library(folder, "a").write_bytes(b"changed")
    manifests.library(folder, "b").unlink()
    found = manifests.problems(folder, manifest, ["a", "b", "c", "d"])
    assert len(found) == 3
    assert "a: " in found[0] and "not the file" in found[0]
    assert "b: " in found[1] and "missing" in found[1]
    assert found[2] == "d: not built"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": "other"}', '{"schema": "autotune/prebuilt-kernels/1"}']
)
def test_a_foreign_manifest_is_one_clear_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(PrebuildError) as raised:
        manifests.read(tmp_path)
    assert "\n" not in str(raised.value) and "prebuild again" in str(raised.value)


def library_package(tmp_path: Path, version: str) -> Path:
    package = tmp_path / "site" / "flashinfer"
    package.mkdir(parents=True)
    (package / "_build_meta.py").write_text(f'"""Build metadata."""\n__version__ = "{version}"\n')
    return package


def test_install_lays_modules_where_the_library_looks(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, {"a": b"1", "b": b"2"})
    package = library_package(tmp_path, "0.7.2")
    assert install(folder, package, "0.1.15.post2") == ["a", "b"]
    assert (package / "data" / "aot" / "a" / "a.so").read_bytes() == b"1"
    assert install(folder, package, "0.1.15.post2") == []


def test_install_refuses_another_version_and_an_older_runtime(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, {"a": b"1"})
    package = library_package(tmp_path, "0.6.18.post1")
    with pytest.raises(PrebuildError, match=r"built for FlashInfer 0\.7\.2, and 0\.6\.18\.post1"):
        install(folder, package, "0.1.11")
    (package / "_build_meta.py").write_text('__version__ = "0.7.2"\n')
    for ffi in ("0.1.9", ""):
        with pytest.raises(PrebuildError, match=r"apache-tvm-ffi 0\.1\.11 or later"):
            install(folder, package, ffi)
    manifests.library(folder, "a").write_bytes(b"changed")
    with pytest.raises(PrebuildError, match="not the file that was built"):
        install(folder, package, "0.1.11")
    with pytest.raises(PrebuildError, match=r"no manifest\.json"):
        install(tmp_path / "site", package, "0.1.11")


def test_releases_compare_as_numbers() -> None:
    assert release("0.1.15.post2") == (0, 1, 15) > release("0.1.9") > release("")
