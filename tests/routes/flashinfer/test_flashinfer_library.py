"""The routes against an installed FlashInfer's own Python layer, without a GPU.

``AUTOTUNE_FLASHINFER_SITE`` lists site-packages folders that hold one each (separated as PATH is), for
example one of 0.6.18.post1 and one of 0.7.2; without it, the FlashInfer of this interpreter if it has one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.domain.cell import Column
from autotune.routes.flashinfer.xqa import hopper_fp8

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SNAPSHOTS = ROOT / "tests" / "data" / "flashinfer-signatures.json"


def sites() -> list[str]:
    """Folders to test against; "" is this interpreter's own."""
    named = [site for site in os.environ.get("AUTOTUNE_FLASHINFER_SITE", "").split(os.pathsep) if site]
    if named:
        return named
    return [""] if importlib.util.find_spec("flashinfer") else []


SITES = sites()
pytestmark = pytest.mark.skipif(
    not SITES, reason="FlashInfer is not installed, and AUTOTUNE_FLASHINFER_SITE names no folder with it"
)


def environment(site: str, workspace: Path) -> dict[str, str]:
    import torch

    paths = [str(ROOT), *([site] if site else []), str(Path(torch.__file__).parents[1])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "FLASHINFER_WORKSPACE_BASE": str(workspace),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0 10.0",
        "FLASHINFER_NO_DOWNLOAD": "1",
        "PYTHONWARNINGS": "ignore",
    }


def label(site: str) -> str:
    """A short name of a site in test ids."""
    return "-".join(Path(site).parts[1:3]) or "own"


@pytest.fixture(scope="module", params=SITES or [""], ids=label)
def driven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every route driven through one site's FlashInfer."""
    folder = tmp_path_factory.mktemp("flashinfer")
    found = subprocess.run(
        [sys.executable, str(HERE / "drive_library.py"), str(folder / "records.json")],
        env=environment(request.param, folder),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    data: dict[str, Any] = json.loads((folder / "records.json").read_text())
    data["site"] = request.param
    return data


def test_every_route_reaches_its_launcher(driven: dict[str, Any]) -> None:
    names = {record["route"] for record in driven["records"]}
    assert len(names) == 8
    for record in driven["records"]:
        launched = [launch["function"] for launch in record["launches"]]
        planned = record["route"] in ("fa2", "fa3", "fa2-decode")
        assert launched == (["plan", "paged_run"] if planned else launched[:1]) and launched, record["route"]


def test_xqa_launcher_gets_the_contract(driven: dict[str, Any]) -> None:
    seen = set()
    for record in driven["records"]:
        if record["route"] != "xqa-decode":
            continue
        column = Column.from_dict(record["column"])
        (launch,) = record["launches"]
        # the order of flashinfer/xqa.py: run_sm90_fp8_mha, sm_count, num_kv_heads, sliding_win_size, ...
        args = launch["args"]
        expected = hopper_fp8(column, record["capability"][0])
        seen.add(expected)
        assert args[0] is expected and args[2] == column.shape.num_kv_heads
        assert args[3] == column.shape.window_left + 1
        page_table, max_seq_len, batch = args[14], args[15], args[17]
        assert page_table["shape"] == [2, column.table_width] and batch == 2
        assert max_seq_len == column.table_width * column.shape.page_size
        mask = args[22]
        assert (mask is None) == (column.q_len == 1)
        assert mask is None or (mask["shape"] == [2, column.q_len, 2] and "uint16" in mask["dtype"])
        k, v = args[10], args[11]
        assert k["stride"] == v["stride"] and k["stride"][-1] == 1
    assert seen == {True, False}


def test_trtllm_gen_launchers_get_the_contract(driven: dict[str, Any]) -> None:
    checked = 0
    for record in driven["records"]:
        if not record["route"].startswith("trtllm-gen"):
            continue
        column = Column.from_dict(record["column"])
        (launch,) = record["launches"]
        args = launch["args"]
        # out, out_scale, query, k, v, workspace, counters, block_tables, seq_lens, max_q_len, max_kv_len
        assert args[3]["stride"] == args[4]["stride"] and args[3]["stride"][-1] == 1
        assert args[7]["shape"] == [2, column.table_width] and args[9] == column.q_len
        assert args[10] == column.max_context
        quantised = column.dtypes.kv in ("e4m3", "nvfp4")
        assert args[2]["dtype"] == ("torch.float8_e4m3fn" if quantised else "torch.bfloat16")
        checked += 1
    assert checked >= 20


def test_snapshot_is_this_version(driven: dict[str, Any], tmp_path: Path) -> None:
    snapshots = json.loads(SNAPSHOTS.read_text())
    if driven["version"] not in snapshots:
        pytest.skip(f"no snapshot of FlashInfer {driven['version']}: run scripts/flashinfer_signatures.py")
    target = tmp_path / "signatures.json"
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "flashinfer_signatures.py"), str(target)],
        env=environment(driven["site"], tmp_path),
        check=True,
        timeout=100,
        capture_output=True,
    )
    assert json.loads(target.read_text())[driven["version"]] == snapshots[driven["version"]]
