"""Which devices are asked for, whether they are alike, and who else uses them."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
import types
from typing import Any

import pytest

from autotune.domain.fingerprint import HARDWARE_KEYS, SOFTWARE_KEYS, Facts
from autotune.hardware import NoDevice, WrongMachine, cuda_probe
from autotune.hardware.devices import BadDevicesError, Device, choose, cpus, parse, require_alike, select
from autotune.hardware.neighbours import neighbours
from autotune.hardware.profile import DeviceProfile

collecting = importlib.import_module("autotune.hardware.collect")
choosing = importlib.import_module("autotune.hardware.devices")

CPU = DeviceProfile("cpu", "cpu")
H200 = DeviceProfile("h200", "cuda", ("NVIDIA H200",), "9.0")


def found(pci: str = "00000000:3B:00.0", **hardware: object) -> dict[str, Any]:
    """What the probe says of one GPU."""
    return {
        "hardware": {
            "name": "NVIDIA H200",
            "compute_capability": "9.0",
            "sm_count": 132,
            "memory_gib": 140,
            "l2_mib": 60,
            "power_limit_w": 700,
            "mig": False,
            **hardware,
        },
        "software": {"cuda": "13.0", "driver": "580.159.03"},
        "informative": {"devices": 2, "pci": pci},
    }


def probe_says(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]) -> list[str]:
    """Make the probe's process, which is real, print ``answer``; its arguments come to the list."""
    real, asked = subprocess.run, []

    def run(command: list[str], **options: object) -> object:
        asked.extend(command[3:])
        code = f"print({json.dumps(answer)!r})"
        return real([sys.executable, "-c", code], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(collecting.subprocess, "run", run)
    monkeypatch.setattr(choosing, "has_nvidia_device", lambda: True)
    return asked


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", (0,)), ("1, 0", (1, 0)), ("all", None), (" all ", None), ("3,10", (3, 10))]
)
def test_lists(text: str, numbers: tuple[int, ...] | None) -> None:
    assert parse(text) == numbers
    assert choose(text, 11) == (numbers if numbers is not None else tuple(range(11)))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "write numbers from 0"),
        ("0,", "write numbers from 0"),
        ("-1", "write numbers from 0"),
        ("cuda:1", "write numbers from 0"),
        ("²", "write numbers from 0"),
        ("all,0", "write numbers from 0"),
        ("1,0,1", "--devices 1,0,1: 1 is named twice"),
        ("0,7", "--devices 0,7: there is no device 7, 0 to 1 are here"),
    ],
)
def test_lists_that_name_nothing(text: str, line: str) -> None:
    with pytest.raises(BadDevicesError, match=line) as caught:
        choose(text, 2)
    assert "\n" not in str(caught.value)


def test_a_machine_with_one() -> None:
    with pytest.raises(BadDevicesError, match="no device 1, 0 alone is here"):
        choose("1", 1)


def test_cores_of_this_machine() -> None:
    devices = select("all", CPU)
    assert [device.name for device in devices] == [f"cpu:{index}" for index in range(len(cpus()))]
    assert [device.presence for device in devices] == [str(core) for core in cpus()]
    assert devices[0].facts.hardware["threads"] == 1
    with pytest.raises(BadDevicesError, match=f"there is no device {len(cpus())}"):
        select(str(len(cpus())), CPU)


def test_gpus_are_asked_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = probe_says(monkeypatch, {"all": [found(), found("00000000:86:00.0")]})
    devices = select("1,0", H200)
    assert asked == ["all"]
    assert [device.name for device in devices] == ["cuda:1", "cuda:0"]
    assert [device.presence for device in devices] == ["00000000:86:00.0", "00000000:3B:00.0"]
    assert set(devices[0].facts.software) >= set(SOFTWARE_KEYS["cuda"])


def test_another_gpu_than_the_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_says(monkeypatch, {"all": [found(name="NVIDIA H20"), found()]})
    with pytest.raises(WrongMachine, match="--gpu h200 asks for"):
        select("0", H200)
    with pytest.raises(WrongMachine, match="this machine has NVIDIA H20"):
        select("all", H200)
    assert select("1", H200)[0].index == 1  # the first of the machine is not asked for


@pytest.mark.parametrize("key", HARDWARE_KEYS["cuda"])
def test_devices_that_differ(key: str) -> None:
    one = Facts("cuda", found()["hardware"], dict.fromkeys(SOFTWARE_KEYS["cuda"], "1"))
    other = copy.deepcopy(one)
    other.hardware[key] = "other"  # type: ignore[index]
    assert one.id != other.id
    devices = [Device(0, one), Device(3, one), Device(2, other)]
    with pytest.raises(WrongMachine) as caught:
        require_alike(devices)
    line = str(caught.value)
    assert line.startswith(f"cuda:2 differs from cuda:0 in hardware.{key} ('other', not ")
    assert "\n" not in line
    require_alike(devices[:2])


def test_another_driver() -> None:
    one = Facts("cuda", found()["hardware"], {"driver": "580"})
    other = Facts("cuda", found()["hardware"], {"driver": "581"})
    with pytest.raises(WrongMachine, match=r"software\.driver \('581', not '580'\)"):
        require_alike([Device(0, one), Device(1, other)])


def test_a_gpu_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = {"error": "CUDA error: device unavailable"}
    probe_says(monkeypatch, {"all": [dead, found(), dead, found()]})
    said: list[str] = []
    assert [device.index for device in select("all", H200, said.append)] == [1, 3]
    reason = "cannot be used: CUDA error: device unavailable; the run goes on without it"
    assert said == [f"--devices all: cuda:{index} {reason}" for index in (0, 2)]
    # one that is named is wanted
    said.clear()
    with pytest.raises(
        NoDevice, match=r"--devices 1,2: cuda:2 cannot be used: CUDA error: device unavail.*[^)]$"
    ):
        select("1,2", H200, said.append)
    assert [device.index for device in select("3", H200, said.append)] == [3]
    assert said == []


def test_no_gpu_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_says(monkeypatch, {"all": [{"error": "device lost"}] * 3})
    with pytest.raises(NoDevice, match=r"--devices all: cuda:0 cannot be used: device lost \(and 2 more\)"):
        select("all", H200)


def test_no_gpu_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_says(monkeypatch, {"error": "torch 2 finds no CUDA device"})
    with pytest.raises(NoDevice, match="finds no CUDA device"):
        select("0", H200)


def test_the_probe_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad device spoils no other; without any, the probe's own reason."""

    def probe(index: int) -> dict[str, Any]:
        if index == 1:
            raise RuntimeError("CUDA error:\n  device lost")
        return {"index": index}

    assert "error" in cuda_probe.main(["all"]) or "all" in cuda_probe.main(["all"])
    monkeypatch.setattr(cuda_probe, "_count", lambda: 3)
    monkeypatch.setattr(cuda_probe, "probe", probe)
    wanted = [{"index": 0}, {"error": "CUDA error: device lost"}, {"index": 2}]
    assert cuda_probe.main(["all"]) == {"all": wanted}
    assert cuda_probe.main([]) == {"index": 0}
    monkeypatch.setattr(cuda_probe, "_count", lambda: "no CUDA")
    assert cuda_probe.main(["all"]) == {"error": "no CUDA"}


class NvmlError(Exception):
    pass


def fake_nvml(processes: dict[bytes, list[Any]], busy: dict[bytes, int]) -> types.ModuleType:
    """The four calls that are made; a device that is not in a table refuses."""

    def ask(table: dict[bytes, Any], handle: bytes) -> Any:
        if handle not in table:
            raise NvmlError
        return table[handle]

    nvml: Any = types.ModuleType("pynvml")
    nvml.NVMLError = NvmlError
    nvml.calls = []
    nvml.nvmlInit = lambda: nvml.calls.append("init")
    nvml.nvmlShutdown = lambda: nvml.calls.append("shutdown")
    nvml.nvmlDeviceGetHandleByPciBusId = lambda pci: pci
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: ask(processes, handle)
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=ask(busy, handle))
    return nvml  # type: ignore[no-any-return]


def gpus(count: int) -> list[Device]:
    each = found()
    return [
        Device(index, Facts("cuda", each["hardware"], {}, {"pci": f"00000000:0{index}:00.0"}))
        for index in range(count)
    ]


def test_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    one, unsaid = (
        types.SimpleNamespace(pid=41, usedGpuMemory=3 << 30),
        types.SimpleNamespace(pid=42, usedGpuMemory=None),
    )
    pci = [f"00000000:0{index}:00.0".encode() for index in range(4)]
    nvml: Any = fake_nvml(
        {pci[0]: [], pci[1]: [one, unsaid], pci[2]: []}, {pci[0]: 0, pci[1]: 97, pci[2]: 50}
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert neighbours(gpus(4)) == [
        "cuda:1 is in use: 2 other processes (pid 41, 42, 3072 MiB); 97 % busy; times measured beside others "
        "are noisier",
        "cuda:2 is in use: 50 % busy; times measured beside others are noisier",
    ]
    assert nvml.calls == ["init", "shutdown"]
    assert neighbours([Device(0, Facts("cpu", {}, {}))]) == []


def test_nobody_to_ask_for_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert neighbours(gpus(1)) == []
    nvml: Any = fake_nvml({}, {})

    def refuse() -> None:
        raise NvmlError

    nvml.nvmlInit = refuse
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert neighbours(gpus(1)) == []
