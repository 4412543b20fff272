"""What the plugins rely on in SGLang and vLLM: against a snapshot, and an unpacked wheel if one is named."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.engines import sglang, vllm
from autotune.engines.outline import fingerprint, of_class, outline

ROOT = Path(__file__).resolve().parents[2]
STORED: dict[str, Any] = json.loads((ROOT / "tests/data/engine-targets.json").read_text("utf-8"))
PLUGINS = {"sglang": sglang, "vllm": vllm}
SITES = {name: os.environ.get(f"AUTOTUNE_{name.upper()}_SITE", "") for name in PLUGINS}


@pytest.mark.parametrize("engine", PLUGINS)
def test_the_snapshot_is_what_the_plugin_was_written_against(engine: str) -> None:
    plugin, stored = PLUGINS[engine], STORED[engine]
    assert (stored["module"], stored["class"]) == (plugin.MODULE, plugin.CLASS)
    assert set(stored["methods"]) == set(plugin.RELIED_ON)
    assert fingerprint(stored["methods"]) == stored["fingerprint"]
    assert {stored["version"]: stored["fingerprint"]} == plugin.KNOWN


def test_positions_that_the_hooks_read() -> None:
    methods = STORED["sglang"]["methods"]
    assert methods["forward_extend"]["parameters"][:6] == ["self", "q", "k", "v", "layer", "forward_batch"]
    for name in sglang.METADATA:
        assert methods[name]["parameters"][:2] == ["self", "forward_batch"]
    assert methods["init_forward_metadata_out_graph"]["parameters"][2] == "in_capture="
    assert STORED["vllm"]["methods"]["build"]["parameters"][2] == "common_attn_metadata"
    assert STORED["sglang"]["registry"]["register"][:4] == ["cls", "target", "hook", "hook_type="]
    assert "AROUND" in STORED["sglang"]["registry"]["types"]


@pytest.mark.parametrize("engine", PLUGINS)
def test_the_real_engine_reads_as_the_snapshot_says(engine: str) -> None:
    if not SITES[engine]:
        pytest.skip(f"AUTOTUNE_{engine.upper()}_SITE names no unpacked {engine}")
    spec = importlib.util.spec_from_file_location("engine_targets", ROOT / "scripts/engine_targets.py")
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    site = Path(SITES[engine])
    found = script.collect(site if engine == "sglang" else None, site if engine == "vllm" else None)
    assert found == {engine: STORED[engine]}


SOURCE = '''
class Backend:
    def run(self, q, k=1, *rest, flag=False, **more):
        """What it does."""
        # a remark
        return q

    def other(self):
        return 2
'''


def _of(source: str) -> str:
    return fingerprint(outline(source, "Backend", ("run",)))


def test_an_outline_sees_code_and_parameters_not_remarks() -> None:
    found = outline(SOURCE, "Backend", ("run",))["run"]
    assert found["parameters"] == ["self", "q", "k=", "*rest", "flag=", "**more"]
    before = _of(SOURCE)
    assert _of(SOURCE.replace("a remark", "another").replace("What it does", "Something")) == before
    assert _of(SOURCE.replace("return 2", "return 3")) == before  # not relied on
    assert _of(SOURCE.replace("return q", "return k")) != before
    assert _of(SOURCE.replace("k=1", "k=2")) != before
    assert _of(SOURCE.replace("flag=False", "flag")) != before


@pytest.mark.parametrize(
    ("source", "said"),
    [("class Other: ...", "no class"), ("class Backend: ...", "no method run"), ("class", "not Python")],
)
def test_an_outline_says_what_is_missing(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        outline(source, "Backend", ("run",))


def test_a_class_without_that_source_is_unfamiliar() -> None:
    class TRTLLMHAAttnBackend:
        """Not SGLang's."""

    with pytest.raises(ValueError, match="has no class"):
        of_class(TRTLLMHAAttnBackend, sglang.RELIED_ON)


@pytest.mark.parametrize(
    ("group", "engine"), [("sglang.srt.plugins", "sglang"), ("vllm.general_plugins", "vllm")]
)
def test_the_entry_points_name_what_there_is(group: str, engine: str) -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    section = text.partition(f'[project.entry-points."{group}"]\n')[2].partition("\n\n")[0]
    assert section == f'autotune = "autotune.engines.{engine}:register"'
    assert callable(PLUGINS[engine].register)


def test_importing_a_plugin_imports_no_engine_and_no_torch() -> None:
    """An entry point is loaded in every process of an engine, its front end included."""
    code = "import sys, autotune.engines.sglang, autotune.engines.vllm; print(sorted(set(sys.modules) & " + (
        "{'torch', 'sglang', 'vllm', 'flashinfer', 'yaml', 'optuna', 'sqlalchemy', 'typer', 'rich'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stderr
