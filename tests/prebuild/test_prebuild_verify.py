"""What a run refuses of installed modules, before anything is launched; a FlashInfer of a few files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from autotune.cli.main import exit_of
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.prebuild import manifest as manifests
from autotune.prebuild import verify as verify_module
from autotune.prebuild.errors import PrebuildError
from autotune.prebuild.manifest import Manifest, Module
from autotune.prebuild.verify import require_selftest, unnamed, verify
from autotune.prebuild.wanted import wanted
from autotune.routes import registry
from autotune.routes.base import Route
from autotune.routes.flashinfer import installed
from autotune.routes.flashinfer.library import LibraryError

COLUMN = Column(Shape(8, 1, 128, 64, kv_layout="fused-nhd"), PROFILES["bf16"], 4, 2, 4096)
FACTS = Facts(
    "cuda",
    {"name": "NVIDIA H200", "compute_capability": "9.0"},
    {"flashinfer": "0.7.2", "cuda": "13.0", "cubins": None},
)


@dataclass
class Answers:
    """Stands for the process that names modules: ``<route>_<q_len>``, those of ``here`` built."""

    here: Path
    asked: list[tuple[str, int]] = field(default_factory=list)
    error: LibraryError | None = None

    def modules(self, route: str, column: Column) -> Mapping[str, str | None]:
        self.asked.append((route, column.q_len))
        if self.error is not None:
            raise self.error
        name = f"{route}_{column.q_len}"
        path = manifests.library(self.here, name)
        return {name: str(path) if path.is_file() else None}


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """An installed FlashInfer 0.7.2 without headers, its modules ``fa2_4`` and ``xqa-decode_4``."""
    package = tmp_path / "flashinfer"
    folder = package / "data" / "aot"
    folder.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this process must not import it')\n")
    (package / "_build_meta.py").write_text('__version__ = "0.7.2"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    installed._version.cache_clear()
    manifest = Manifest("0.7.2", "abc", "", "13.0", "9.0")
    for name in ("fa2_4", "xqa-decode_4"):
        path = manifests.library(folder, name)
        path.parent.mkdir()
        path.write_bytes(name.encode())
        manifest.modules[name] = Module(name, manifests.digest(path), len(name), 1.0, "r")
    manifest.write(folder)
    found = Answers(folder)
    monkeypatch.setattr(installed, "library", lambda arch: found)
    monkeypatch.setattr(installed, "has_nvidia_device", lambda: True)
    monkeypatch.setattr("autotune.prebuild.wanted.library", lambda arch: found)
    return found


def chosen(*names: str) -> dict[str, Route]:
    return {name: route for name, route in registry.routes("cuda").items() if name in names}


def damage(answers: Answers, name: str) -> None:
    manifests.library(answers.here, name).write_bytes(b"damaged")


def test_right_modules_pass_without_a_question(answers: Answers) -> None:
    verify(FACTS, [COLUMN], chosen("fa2"))
    assert answers.asked == []


def test_a_module_that_this_run_loads_and_that_is_another_file_is_one_line(answers: Answers) -> None:
    damage(answers, "fa2_4")
    with pytest.raises(PrebuildError, match=r"fa2_4: .*fa2_4\.so is not the file that was built") as raised:
        verify(FACTS, [COLUMN], chosen("fa2"))
    assert "\n" not in str(raised.value) and "autotune prebuild --out DIR --into" in str(raised.value)
    assert exit_of(raised.value) == (str(raised.value), 1)


def test_one_that_it_does_not_load_is_no_matter_but_the_self_test_s_is(answers: Answers) -> None:
    damage(answers, "fa2_4")
    verify(FACTS, [replace(COLUMN, q_len=5)], chosen("fa2"))
    verify(FACTS, [COLUMN], chosen("fmha-v2"))
    damage(answers, "xqa-decode_4")
    with pytest.raises(PrebuildError, match="xqa-decode_4"):
        verify(FACTS, [COLUMN], chosen("fmha-v2"))
    answers.error = LibraryError("it died")
    # which it loads is not known: neither may be wrong
    with pytest.raises(PrebuildError, match=r"fa2_4.* \(and 1 more\)"):
        verify(FACTS, [COLUMN], chosen("fmha-v2"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"flashinfer": "0.7.1"}, "built for FlashInfer 0.7.1, and 0.7.2 is installed"),
        ({"tvm_ffi": "999.0"}, "needs apache-tvm-ffi 999.0 or later"),
        ({"compute_capability": "10.0"}, "built for compute capability 10.0, and the device here has 9.0"),
        ({"cuda": "12.8"}, "built with CUDA 12.8, and torch here brings CUDA 13.0"),
    ],
)
def test_modules_of_another_build_are_one_line(change: dict[str, str], said: str, answers: Answers) -> None:
    manifest = manifests.read(answers.here)
    assert manifest is not None
    replace(manifest, **change).write(answers.here)  # type: ignore[arg-type]
    with pytest.raises(PrebuildError) as raised:
        verify(FACTS, [COLUMN], chosen("fa2"))
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert f"remove {answers.here}" in str(raised.value)


def test_a_module_without_a_kernel_for_a_head_size_of_this_run_is_one_line(answers: Answers) -> None:
    """fmha-v2's module has one name whatever it holds; asked for another size it ends the process."""
    name = "fmha-v2_4"
    path = manifests.library(answers.here, name)
    path.parent.mkdir()
    path.write_bytes(b"fmha")
    manifest = manifests.read(answers.here)
    assert manifest is not None
    module = Module(name, manifests.digest(path), 4, 1.0, "r", ("fmha-v2",), (128,))
    manifest.modules[name] = module
    manifest.write(answers.here)
    wide = replace(COLUMN, shape=replace(COLUMN.shape, head_dim=256, head_dim_vo=256))
    verify(FACTS, [COLUMN], chosen("fmha-v2"))
    assert answers.asked == []
    verify(FACTS, [wide], chosen("fa2"))
    assert answers.asked == []
    verify(FACTS, [COLUMN, replace(wide, q_len=5)], chosen("fmha-v2"))  # that loads another module
    with pytest.raises(PrebuildError) as raised:
        verify(FACTS, [COLUMN, wide], chosen("fmha-v2"))
    said = str(raised.value)
    assert "fmha-v2_4: built for head sizes 128, and 256 is asked for" in said and "\n" not in said
    assert "into the same folder" in said and f"--into {answers.here.parents[1]}" in said
    answers.error = LibraryError("it died")
    with pytest.raises(PrebuildError, match="built for head sizes 128"):
        verify(FACTS, [wide], chosen("fmha-v2"))
    answers.error = None
    manifest.modules[name] = replace(module, head_dims=(128, 256))
    manifest.write(answers.here)
    verify(FACTS, [COLUMN, wide], chosen("fmha-v2"))


def test_without_manifest_library_or_device_there_is_nothing_to_check(answers: Answers) -> None:
    damage(answers, "fa2_4")
    verify(replace(FACTS, software={**FACTS.software, "flashinfer": "0.6.18"}), [COLUMN], chosen("fa2"))
    verify(Facts("cpu", {}, {}), [COLUMN], {})
    (answers.here / "manifest.json").unlink()
    verify(FACTS, [COLUMN], chosen("fa2"))


def test_modules_in_no_manifest_are_named_and_not_refused(answers: Answers) -> None:
    assert unnamed(FACTS) is None
    for name in ("fa2_9", "fa3_4", "fa3_5", "fa3_6"):
        path = manifests.library(answers.here, name)
        path.parent.mkdir()
        path.write_bytes(b"whose?")
    (answers.here / "stray").mkdir()
    (answers.here / "stray" / "other.so").write_bytes(b"no module of that name is looked for here")
    said = unnamed(FACTS)
    assert said is not None and "\n" not in said
    assert said.startswith(f"{answers.here}: in no manifest") and "fa2_9, fa3_4, fa3_5 and 1 more;" in said
    verify(FACTS, [COLUMN], chosen("fa2"))
    assert unnamed(Facts("cpu", {}, {})) is None
    (answers.here / "manifest.json").unlink()
    assert unnamed(FACTS) is None  # FlashInfer's own builds have none


def test_the_self_test_s_module_must_be_here(answers: Answers) -> None:
    require_selftest(FACTS)
    require_selftest(Facts("cpu", {}, {}))
    manifests.library(answers.here, "xqa-decode_4").unlink()
    with pytest.raises(PrebuildError, match=r"self-test runs XQA .* module xqa-decode_4 is not built"):
        require_selftest(FACTS)


def test_what_a_space_wants(answers: Answers) -> None:
    columns = [COLUMN, replace(COLUMN, batch_size=8), replace(COLUMN, q_len=1)]
    found = wanted(FACTS, columns, chosen("fa2"))
    assert sorted(found.modules) == ["fa2_1", "fa2_4", "xqa-decode_4"]
    assert found.missing == ["fa2_1"]
    assert found.routes["xqa-decode_4"] == {"xqa-decode"}
    assert sorted(answers.asked) == [("fa2", 1), ("fa2", 4), ("xqa-decode", 4)]
    answers.error = LibraryError("FlashInfer refuses it")
    assert wanted(FACTS, columns, chosen("fa2")).refused == ["FlashInfer refuses it"] * 3
    answers.error = LibraryError("no module named tvm_ffi", unusable=True)
    with pytest.raises(LibraryError, match="tvm_ffi"):
        wanted(FACTS, columns, chosen("fa2"))
    assert verify_module._loaded(FACTS, columns, chosen("fa2")) is None
