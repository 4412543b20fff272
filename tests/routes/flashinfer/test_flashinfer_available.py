"""``available``: which modules are here, asked of the library in another process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.hardware.flashinfer import package_folder
from autotune.routes import registry
from autotune.routes.flashinfer import compiler, installed
from autotune.routes.flashinfer.library import Library, LibraryError
from autotune.tuner.lineup import Probing

NAME = "xqa_input_bf16"


class Answers:
    """Stands for the process that names modules."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: LibraryError | None = None

    def modules(self, route: str, column: Column) -> Mapping[str, str | None]:
        if self.error is not None:
            raise self.error
        return {NAME: str(self.path) if self.path.is_file() else None}


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Facts:
    """Of an H200 with the FlashInfer that lies in ``tmp_path``, with headers."""
    monkeypatch.setattr(installed, "has_nvidia_device", lambda: True)
    package = tmp_path / "flashinfer"
    for name in ("", "data/include", "data/cutlass"):
        (package / name).mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise ImportError('this process must not import it')\n")
    (package / "_build_meta.py").write_text('__version__ = "0.7.2"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)
    installed._version.cache_clear()
    hardware = {"name": "NVIDIA H200", "compute_capability": "9.0"}
    return Facts("cuda", hardware, {"flashinfer": "0.7.2", "cubins": None})


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What the library answers; JIT is off."""
    found = Answers(tmp_path / "module.so")
    monkeypatch.setattr(installed, "library", lambda arch: found)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    return found


def available(column: Column, facts: Facts, name: str = "xqa-decode") -> str | None:
    route = registry.get(name)
    assert isinstance(route, Probing)
    return route.available(column, facts)


def test_every_route_of_the_library_can_say() -> None:
    for name, route in registry.routes("cuda").items():
        assert isinstance(route, Probing) == (registry.is_built_in(name)), name


def test_a_module_that_is_not_here_is_named_with_the_commands(
    facts: Facts, answers: Answers, make_column: Callable[..., Column]
) -> None:
    said = available(make_column(), facts)
    assert said is not None and "\n" not in said
    assert f"module {NAME} is not built" in said and "FLASHINFER_DISABLE_JIT is set" in said
    assert "autotune prebuild --gpu h200 --out DIR" in said and "--into" in said
    answers.path.write_bytes(b"built")
    assert available(make_column(), facts) is None


def test_where_it_can_be_compiled_nobody_is_asked(
    facts: Facts, answers: Answers, make_column: Callable[..., Column], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    monkeypatch.setattr(installed, "lacking", lambda where: None)
    answers.error = LibraryError("asked")
    assert available(make_column(), facts) is None


def test_a_library_that_cannot_be_asked(
    facts: Facts, answers: Answers, make_column: Callable[..., Column]
) -> None:
    answers.error = LibraryError("it refuses the column")
    assert available(make_column(), facts) is None  # the proof will tell
    answers.error = LibraryError("FlashInfer cannot be imported (no tvm_ffi)", unusable=True)
    assert available(make_column(), facts) == "FlashInfer cannot be imported (no tvm_ffi)"


def test_another_machine_s_facts_are_not_about_what_is_here(
    facts: Facts, answers: Answers, make_column: Callable[..., Column], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Facts("cuda", facts.hardware, {**facts.software, "flashinfer": "0.6.18.post1"})
    assert available(make_column(), stored) is None
    assert available(make_column(), Facts("cuda", facts.hardware, {"flashinfer": None})) is None
    assert available(make_column(), facts) is not None
    monkeypatch.setattr(installed, "has_nvidia_device", lambda: False)  # evidence read on a laptop
    assert available(make_column(), facts) is None


def test_precompiled_kernels_are_asked_for_by_package(
    facts: Facts, answers: Answers, make_column: Callable[..., Column]
) -> None:
    said = available(make_column(), facts, "trtllm-gen-decode")
    assert said is not None and "pip install flashinfer-cubin==0.7.2" in said
    answers.path.write_bytes(b"built")
    pinned = Facts("cuda", facts.hardware, {**facts.software, "cubins": "0123"})
    assert available(make_column(), pinned, "trtllm-gen-decode") is None


def test_what_compiling_takes(tmp_path: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    package, home, tools = tmp_path / "flashinfer", tmp_path / "cuda", tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("CXX", "a-compiler")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(
        "autotune.routes.flashinfer.compiler.sys.executable", str(tmp_path / "bin" / "python")
    )

    def tool(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        path.chmod(0o755)

    found = []
    for path in (home / "bin" / "nvcc", tools / "ninja", tools / "a-compiler", None):
        found.append(compiler.lacking(package))
        if path is not None:
            tool(path)
    assert found == ["no nvcc", "no ninja", "no C++ compiler", None]
    (package / "data" / "include").rmdir()
    assert compiler.lacking(package) == "this FlashInfer was installed without data/include"
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert compiler.lacking(package) == "FLASHINFER_DISABLE_JIT is set"


def child(tmp_path: Path, *lines: str, name: str = "python") -> str:
    """An interpreter that prints these lines, one an answer, whatever it is asked, and counts its starts."""
    path = tmp_path / name
    answers = "\n".join(f"read question && echo '{line}'" for line in lines[1:])
    path.write_text(f"#!/bin/sh\necho start >> {tmp_path}/starts\necho '{lines[0]}'\n{answers}\nread end\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def closing() -> Iterator[list[Library]]:
    """Libraries to close."""
    made: list[Library] = []
    yield made
    for each in made:
        each.close()


def test_questions_are_asked_once_and_the_process_is_started_again(
    tmp_path: Path, make_column: Callable[..., Column], closing: list[Library]
) -> None:
    answer = json.dumps({"modules": {NAME: None}})
    asked = Library("9.0", child(tmp_path, '{"flashinfer": "0.7.2"}', answer))
    closing.append(asked)
    for batch in (1, 2, 256):  # batch and context ask for the same modules
        assert asked.modules("xqa-decode", make_column(batch=batch, context=64 * batch)) == {NAME: None}
    assert (tmp_path / "starts").read_text().count("start") == 1
    asked.close()  # as after two idle minutes
    assert asked.modules("xqa-decode", make_column(q_len=5)) == {NAME: None}
    assert (tmp_path / "starts").read_text().count("start") == 2


def test_a_question_to_a_process_that_is_ending_is_asked_again(
    tmp_path: Path, make_column: Callable[..., Column], closing: list[Library]
) -> None:
    """It answers once and is then no reader any more, while it still runs: as at the end of its idle time."""
    ends = f"""#!/bin/sh
echo start >> {tmp_path}/starts
echo '{{"flashinfer": "0.7.2"}}'
read question && echo '{{"modules": {{"{NAME}": null}}}}'
exec <&- >&-
sleep 1
"""
    path = tmp_path / "ends"
    path.write_text(ends)
    path.chmod(0o755)
    asked = Library("9.0", str(path))
    closing.append(asked)
    for q_len in (1, 2, 3):
        assert asked.modules("xqa-decode", make_column(q_len=q_len)) == {NAME: None}
    assert (tmp_path / "starts").read_text().count("start") == 3
    asked.close()


def test_closing_after_an_unread_question_raises_nothing(
    tmp_path: Path, make_column: Callable[..., Column]
) -> None:
    path = tmp_path / "deaf"
    path.write_text('#!/bin/sh\nexec <&-\necho \'{"flashinfer": "0.7.2"}\'\nsleep 1\n')
    path.chmod(0o755)
    asked = Library("9.0", str(path))
    for q_len in (1, 2):
        with pytest.raises(LibraryError, match="died"):
            asked.modules("xqa-decode", make_column(q_len=q_len))
    asked.close()


def test_a_process_that_dies_and_a_library_that_cannot_be_imported(
    tmp_path: Path, make_column: Callable[..., Column], closing: list[Library]
) -> None:
    path = tmp_path / "dies"
    path.write_text("#!/bin/sh\necho first >&2; echo 'out of disk' >&2; exit 3\n")
    path.chmod(0o755)
    closing += [
        Library("9.0", str(path)),
        Library("9.0", child(tmp_path, '{"missing": "ModuleNotFoundError: tvm_ffi"}', name="bare")),
        Library("9.0", child(tmp_path, '{"flashinfer": "0.7.2"}', '{"error": "ValueError: no"}')),
    ]
    said = []
    for asked in closing:
        with pytest.raises(LibraryError) as raised:
            asked.modules("fa2", make_column())
        said.append((str(raised.value), raised.value.unusable))
    assert said[0] == ("the process that names FlashInfer's modules died: out of disk", False)
    assert said[1] == ("FlashInfer cannot be imported (ModuleNotFoundError: tvm_ffi)", True)
    assert said[2][0].startswith("FlashInfer refuses ") and "ValueError: no" in said[2][0]
    before = (tmp_path / "starts").read_text()
    with pytest.raises(LibraryError):  # not tried again for another column
        closing[1].modules("fa2", make_column(q_len=7))
    assert (tmp_path / "starts").read_text() == before


@pytest.mark.skipif(package_folder("flashinfer") is not None, reason="FlashInfer is installed")
def test_a_real_process_without_the_library(
    make_column: Callable[..., Column], closing: list[Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    asked = Library("9.0", sys.executable)
    closing.append(asked)
    with pytest.raises(LibraryError, match="No module named 'flashinfer'"):
        asked.modules("fa2", make_column())


LIBRARY = {
    "__init__.py": "import flashinfer.jit.env\n__version__ = '9.9'\nprint('a banner')\n",
    "decode.py": """
from flashinfer.jit.core import JitSpec

def trtllm_batch_decode_with_kv_cache(q_len_per_req, out, **more):
    if q_len_per_req == 7:
        raise ValueError("seven is refused")
    JitSpec(f"xqa_{q_len_per_req}").build_and_load().run(out)
""",
    "jit/__init__.py": "",
    "jit/core.py": """
class JitSpec:
    def __init__(self, name):
        self.name = name

    def build_and_load(self):
        raise RuntimeError("compiles")
""",
    "jit/attention/__init__.py": "",
    "jit/attention/fmha_v2/__init__.py": "",
    "jit/attention/fmha_v2/fmha_library.py": "def is_kernel_spec_valid(spec):\n    return True\n",
}
# where 0.6 looks for built modules, and the search of 0.7
ENVS = {
    "0.6": "import pathlib\nFLASHINFER_AOT_DIR = pathlib.Path(__file__).parents[1] / 'data' / 'aot'\n",
    "0.7": """
import pathlib, types

def get_aot_artifacts(name):
    path = pathlib.Path(__file__).parents[1] / "data" / "aot" / name / f"{name}.so"
    return (types.SimpleNamespace(path=path),) if path.exists() else ()
""",
}


@pytest.mark.parametrize("version", list(ENVS))
def test_a_real_process_asks_the_library(
    version: str,
    tmp_path: Path,
    make_column: Callable[..., Column],
    closing: list[Library],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = tmp_path / "flashinfer"
    for name, text in {**LIBRARY, "jit/env.py": ENVS[version]}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    built = package / "data" / "aot" / "xqa_4" / "xqa_4.so"
    built.parent.mkdir(parents=True)
    built.write_bytes(b"built")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = Library("9.0")
    closing.append(asked)
    assert asked.modules("xqa-decode", make_column()) == {"xqa_4": str(built)}
    assert asked.modules("xqa-decode", make_column(q_len=5)) == {"xqa_5": None}
    with pytest.raises(LibraryError, match="ValueError: seven is refused"):
        asked.modules("xqa-decode", make_column(q_len=7))
    assert "flashinfer" not in sys.modules


SITES = [site for site in os.environ.get("AUTOTUNE_FLASHINFER_SITE", "").split(os.pathsep) if site]


@pytest.mark.skipif(not SITES, reason="AUTOTUNE_FLASHINFER_SITE names no folder with FlashInfer")
@pytest.mark.parametrize("site", SITES or [""])
def test_the_real_library_names_them(
    site: str, make_column: Callable[..., Column], closing: list[Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([site, str(Path(torch.__file__).parents[1])]))
    asked = Library("9.0")
    closing.append(asked)
    (name,) = asked.modules("xqa-decode", make_column())
    assert name.startswith("xqa_") and "spec_q_seq_len_4" in name
    assert len(asked.modules("fmha-v2", make_column())) == 1
    assert "flashinfer" not in sys.modules
