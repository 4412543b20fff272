"""The trtllm-gen routes through an installed FlashInfer, its launcher emulated, in guarded memory.

Sites as in ``test_flashinfer_library.py``. The same checks, worker and arena as for every route on the CPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autotune.checks import registry
from autotune.domain.verdict import CheckStatus, FailureKind
from autotune.routes.flashinfer.emulation.arguments import ORDERS
from autotune.routes.flashinfer.emulation.planted import MISTAKES
from autotune.routes.flashinfer.emulation.route import BASES
from tests.routes.flashinfer.drive_emulation import COLUMNS, PROVEN
from tests.routes.flashinfer.test_flashinfer_library import HERE, SITES, environment, label

pytestmark = [
    pytest.mark.skipif(
        not SITES,
        reason="FlashInfer is not installed, and AUTOTUNE_FLASHINFER_SITE names no folder with it",
    ),
    # sixty checks in a process of its own: half a minute, on a machine that does nothing else
    pytest.mark.timeout(400),
]
WRONG, UNWRITTEN, NAN = FailureKind.WRONG_OUTPUT, FailureKind.UNWRITTEN_OUTPUT, FailureKind.NAN_LEAK
# mistake -> how it must end; None: it is not one
EXPECTED = {
    "lengths-without-the-new-tokens": WRONG,
    "query-lengths": WRONG,
    "int64-lengths": WRONG,
    "narrow-table": FailureKind.ILLEGAL_ACCESS,
    "sliced-table": WRONG,
    "token-slots-for-pages": FailureKind.ILLEGAL_ACCESS,
    "rounded-batch": UNWRITTEN,
    "uneven-queries": WRONG,
    "uneven-offsets": UNWRITTEN,
    "kv-offsets-in-pages": None,
    "short-bound": WRONG,
    "spread-values": WRONG,
    "meaningless-stride": FailureKind.LAUNCH_ERROR,
    "key-scale-left-out": WRONG,
    "value-scale-left-out": WRONG,
    "sinks-left-out": WRONG,
    "swapped-block-scales": WRONG,
    "linear-value-scales": WRONG,
    "spread-value-scales": WRONG,
    "dirty-counters": NAN,
    "counters-never-zeroed": UNWRITTEN,
    "small-counters": FailureKind.LAUNCH_ERROR,
    "no-such-kernel": None,
}


def drive(site: str, folder: Path, what: str, *args: str) -> dict[str, Any]:
    """What ``drive_emulation.py`` found with one site's FlashInfer."""
    found = subprocess.run(
        [sys.executable, str(HERE / "drive_emulation.py"), str(folder / f"{what}.json"), what, *args],
        env=environment(site, folder),
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    data: dict[str, Any] = json.loads((folder / f"{what}.json").read_text())
    return data


@pytest.fixture(scope="module", params=SITES or [""], ids=label)
def site(request: pytest.FixtureRequest) -> str:
    """One FlashInfer."""
    return str(request.param)


@pytest.mark.parametrize("name", BASES)
def test_a_route_passes_every_check(site: str, name: str, tmp_path: Path) -> None:
    rows = drive(site, tmp_path, "proofs", name)["rows"]
    bad = [row for row in rows if row["status"] not in ("passed", "not_applicable")]
    assert bad == []
    passed = Counter(row["column"] for row in rows if row["status"] == "passed")
    assert set(passed) == set(PROVEN[name])
    for column in PROVEN[name]:
        asked = COLUMNS[column]
        # `scales` says nothing about a 16-bit cache
        assert passed[column] == len(registry.expected(asked, "cpu")) - (asked.dtypes.kv == "bf16")
    assert {row["route"] for row in rows} == {f"emulated-{name}"}
    assert all(row["placements"] == ["tail", "head"] for row in rows if row["status"] == "passed")
    # nothing of it is owed to padding, and what is dead is not touched
    assert all(not row.get("requires") for row in rows)


def test_every_mistake_fails_its_check(site: str, tmp_path: Path) -> None:
    rows = drive(site, tmp_path, "mistakes")["rows"]
    assert {row["route"] for row in rows} == set(MISTAKES)
    for row in rows:
        wanted = EXPECTED[row["mistake"]]
        found = (CheckStatus(row["status"]), row.get("kind") and FailureKind(row["kind"]))
        status = CheckStatus.PASSED if wanted is None else CheckStatus.FAILED
        if row["mistake"] == "no-such-kernel":
            status = CheckStatus.REFUSED
            assert "contract rule kernel: Missing TRTLLM-GEN kernel (decode)" in row["detail"]
        assert found == (status, wanted), row
        if row["mistake"] == "narrow-table":
            assert "narrow_table: 0 bytes past the end" in row["detail"]
        if row["mistake"] == "token-slots-for-pages":
            assert re.search(r"kv_cache: \d+ bytes past the end", row["detail"])


def test_the_library_passes_the_arguments_that_are_tested_without_it(site: str, tmp_path: Path) -> None:
    assert drive(site, tmp_path, "arguments")["rows"] == [f"compared {len(BASES) * len(COLUMNS)}"]


def test_the_launchers_still_take_these_arguments(site: str) -> None:
    """The names and their order, from the C++ source that the package brings."""
    folder = Path(site) if site else _own()
    source = (folder / "flashinfer" / "data" / "csrc" / "trtllm_fmha_kernel_launcher.cu").read_text()
    for function, orders in ORDERS.items():
        found = re.search(rf"void {function}\(([^{{]*)\)\s*{{", source)
        assert found, function
        # commas inside template arguments separate types, not parameters
        flat = re.sub(r"<[^<>]*>", "", found.group(1))
        names = tuple(parameter.split()[-1] for parameter in flat.split(","))
        assert names in orders, function


def _own() -> Path:
    import importlib.util

    found = importlib.util.find_spec("flashinfer")
    assert found is not None and found.origin is not None
    return Path(found.origin).parents[1]
