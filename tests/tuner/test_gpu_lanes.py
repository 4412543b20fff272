"""Several GPUs of one host: each child has its own, and a study is settled on all of them."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from autotune.hardware.collect import collect_cuda
from autotune.hardware.devices import Device, require_alike
from autotune.worker.presence import trouble
from autotune.worker.worker import Worker
from tests.console import Script


@pytest.fixture(scope="module")
def gpus() -> list[Device]:
    """All GPUs of this host; they are alike."""
    devices = [
        Device(index, facts) for index, facts in enumerate(collect_cuda()) if not isinstance(facts, str)
    ]
    if len(devices) < 2:
        pytest.skip("needs two CUDA GPUs")
    require_alike(devices)
    return devices


@pytest.mark.gpu
def test_each_child_has_its_own_gpu_and_no_other(gpus: list[Device]) -> None:
    assert len({device.presence for device in gpus}) == len(gpus)
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(device.name)) for device in gpus]
        for device, worker in zip(gpus, workers, strict=True):
            assert trouble(worker, "cuda", device.presence) is None
        assert "has another device" in str(trouble(workers[0], "cuda", gpus[1].presence))


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_a_study_on_all_gpus(gpus: list[Device], tmp_path: Path) -> None:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs FlashInfer")
    hardware = gpus[0].facts.hardware
    space = tmp_path / "small.yaml"
    space.write_text(
        f"""
schema: "autotune/search-space/1"
gpu: "here"
device:
  kind: "cuda"
  names: ["{hardware["name"]}"]
  compute_capability: "{hardware["compute_capability"]}"
engines: ["generic"]
models:
- {{model: "llama-3.1-70b", attn_tp: [8]}}
dtypes: ["bf16"]
q_len: [4]
batch_size: [1, 2, 4, 8]
kv_len: [1024, 4096]
max_context: 4096
objectives: ["graph"]
"""
    )
    database = tmp_path / "evidence.db"
    flags = ["--space", str(space), "--db", f"sqlite:///{database}", "--out", str(tmp_path), "--no-sanitizer"]
    started = Script(["run", *flags, "--devices", "all", "--json"], tmp_path)
    result = started.end(timeout_s=800)
    started.assert_nothing_left()
    assert result.code == 0, result.err
    assert result.json["settled"] == result.json["cells"] == 8
    assert result.json["devices_at_work"] == [device.name for device in gpus]
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT value_json FROM trial_user_attributes WHERE key = 'device'")
        assert {json.loads(value) for (value,) in rows} == {device.name for device in gpus[:8]}
