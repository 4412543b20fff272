"""The manifest of a folder of modules, and installing such a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.prebuild import manifest as manifests
from autotune.prebuild.errors import PrebuildError
from autotune.prebuild.install import aot_folder, install, release
from autotune.prebuild.manifest import Manifest, Module
from autotune.prebuild.merge import merge


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
    assert manifests.problems(folder, manifest) == {}
    manifests.library(folder, "a").write_bytes(b"changed")
    manifests.library(folder, "b").unlink()
    found = manifests.problems(folder, manifest, ["a", "b", "c", "d"])
    assert list(found) == ["a", "b", "d"]
    assert "a: " in found["a"] and "not the file" in found["a"]
    assert "b: " in found["b"] and "missing" in found["b"]
    assert found["d"] == "d: not built"


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


def test_the_manifest_travels_with_an_installation(tmp_path: Path) -> None:
    package = library_package(tmp_path, "0.7.2")
    first, _ = folder_of(tmp_path / "one", {"a": b"1"})
    second, _ = folder_of(tmp_path / "two", {"b": b"2"})
    install(first, package, "0.1.11")
    install(second, package, "0.1.11")
    found = manifests.require_whole(package / "data" / "aot")
    assert sorted(found.modules) == ["a", "b"]
    assert found.build_of() == ("0.7.2", "abc", "0.1.11", "13.0", "9.0")


def test_what_is_there_already_stays_and_what_was_damaged_is_replaced(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "new", {"a": b"built again", "b": b"2"})
    target, kept = folder_of(tmp_path / "old", {"a": b"built before", "b": b"2"})
    manifests.library(target, "b").write_bytes(b"damaged")
    assert merge(folder, target) == ["b"]
    assert manifests.library(target, "a").read_bytes() == b"built before"
    assert manifests.require_whole(target).modules["a"] == kept.modules["a"]


def test_modules_of_another_build_do_not_mix(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "new", {"a": b"1"})
    target, kept = folder_of(tmp_path / "old", {"b": b"2"})
    replace(kept, compute_capability="10.0").write(target)
    with pytest.raises(PrebuildError, match=r"compute capability 10\.0.*remove .*old.* first") as raised:
        merge(folder, target)
    assert "\n" not in str(raised.value)
    assert not manifests.library(target, "a").exists()


def test_of_two_modules_of_one_name_the_one_with_more_head_sizes_stays(tmp_path: Path) -> None:
    folders = {}
    for sizes in ((128,), (256,), (128, 256)):
        folder, manifest = folder_of(tmp_path / str(sizes), {"fmha": str(sizes).encode()})
        manifest.modules["fmha"] = replace(manifest.modules["fmha"], recipe=str(sizes), head_dims=sizes)
        manifest.write(folder)
        folders[sizes] = folder
    assert merge(folders[128,], tmp_path / "target") == ["fmha"]
    with pytest.raises(PrebuildError, match=r"for head sizes 128, .* for 256: prebuild both"):
        merge(folders[256,], tmp_path / "target")
    assert merge(folders[128, 256], tmp_path / "target") == ["fmha"]
    assert merge(folders[256,], tmp_path / "target") == []
    assert manifests.require_whole(tmp_path / "target").modules["fmha"].head_dims == (128, 256)


def test_install_refuses_another_commit_of_the_version(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, {"a": b"1"})
    package = library_package(tmp_path, "0.7.2")
    with (package / "_build_meta.py").open("a") as meta:
        meta.write('__git_commit__ = "def"\n')
    with pytest.raises(PrebuildError, match=r"built for commit abc of .*, and def is installed"):
        install(folder, package, "0.1.11")


def test_a_version_that_looks_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, manifest = folder_of(tmp_path, {"a": b"1"})
    replace(manifest, flashinfer="0.6.18.post1").write(folder)
    package = library_package(tmp_path, "0.6.18.post1")
    assert aot_folder(package) == package / "data" / "aot"
    (package.parent / "flashinfer_jit_cache").mkdir()
    (package.parent / "flashinfer_jit_cache" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    with pytest.raises(PrebuildError, match="from the package flashinfer-jit-cache only"):
        install(folder, package, "0.1.11")
