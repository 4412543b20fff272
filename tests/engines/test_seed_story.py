"""The replayed story, on the installed FlashInfer's own Python layer: the page that docs/engines.md shows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.routes.flashinfer.test_flashinfer_library import SITES, environment, label

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(
        not SITES,
        reason="FlashInfer is not installed, and AUTOTUNE_FLASHINFER_SITE names no folder with it",
    ),
    pytest.mark.timeout(300),
]


def story(site: str, folder: Path, what: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/engines/drive_story.py"), what],
        cwd=ROOT,
        env=environment(site, folder),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


@pytest.mark.parametrize("site", SITES, ids=label)
def test_unprotected_it_is_an_illegal_access(site: str, tmp_path: Path) -> None:
    code, found, _ = story(site, tmp_path, "unprotected")
    assert code == -signal.SIGSEGV and found == {}


@pytest.mark.parametrize("site", SITES, ids=label)
def test_the_contract_refuses_it_and_the_fallback_serves(site: str, tmp_path: Path) -> None:
    code, found, errors = story(site, tmp_path, "refused")
    assert code == 0, errors
    assert found["called"] == {"trtllm-gen-context: contract": 1}
    assert "contract rule table_width: page_table is 8 pages of 16 tokens wide" in found["said"]
    assert found["overwritten"] == []


@pytest.mark.parametrize("site", SITES, ids=label)
def test_lengths_without_the_new_tokens_are_silent_without_it(site: str, tmp_path: Path) -> None:
    """No address is wrong then, only every answer; the same refusal, by the table that came with them."""
    code, found, errors = story(site, tmp_path, "lengths")
    assert code == 0, errors
    assert found["unprotected_error"] > 0.1
    assert found["called"] == {"trtllm-gen-context: contract": 1}


@pytest.mark.parametrize("site", SITES, ids=label)
def test_right_metadata_are_routed_where_proven(site: str, tmp_path: Path) -> None:
    code, found, errors = story(site, tmp_path, "routed")
    assert code == 0, errors
    assert found["called"] == {"trtllm-gen-decode: proven_faster": 1}
    assert found["error"] < 0.011
