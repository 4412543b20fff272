"""The facts of this machine, taken on this machine; and of machines whose files are written here."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import types
from pathlib import Path

import pytest

from autotune.domain.fingerprint import HARDWARE_KEYS, SOFTWARE_KEYS, Facts, mismatches
from autotune.hardware import HardwareError, NoDevice, collect, cpu, cuda_probe, flashinfer

collecting = importlib.import_module("autotune.hardware.collect")

ARM = """processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd evtstrm aes sha2 asimdhp asimddp sve i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd4f
"""


def test_cpu_facts_have_exactly_the_binding_keys() -> None:
    facts = collect("cpu", threads=1)
    assert facts.device == "cpu"
    assert tuple(facts.hardware) == HARDWARE_KEYS["cpu"]
    assert tuple(facts.software) == SOFTWARE_KEYS["cpu"]
    assert facts.hardware["threads"] == 1
    assert isinstance(facts.hardware["name"], str)
    assert facts.hardware["name"]
    assert mismatches(facts, collect("cpu", threads=1)) == []
    assert Facts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
    assert facts.informative["python"] == platform.python_version()


def test_threads_are_looked_at_and_not_assumed() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            assert collect("cpu").hardware["threads"] == threads
            assert collect("cpu", threads=1).hardware["threads"] == 1
    finally:
        torch.set_num_threads(before)


def test_threads_are_not_known_where_torch_is_not_imported() -> None:
    code = (
        "import sys; from autotune.hardware import collect; "
        "assert collect('cpu').hardware['threads'] is None; "
        "assert collect('cpu', threads=1).hardware['threads'] == 1; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_is_known_without_its_import() -> None:
    code = (
        "import sys; from autotune.hardware import collect; f = collect('cpu'); "
        "assert 'torch' not in sys.modules; print(f.software['torch'], f.software['torch_commit'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    import torch

    assert done.stdout.split() == [torch.__version__, torch.version.git_version]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_cores_are_those_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert collect("cpu").hardware["cores"] == 1
    finally:
        os.sched_setaffinity(0, before)
    assert collect("cpu").hardware["cores"] == len(before)


def test_isa_takes_what_kernels_are_chosen_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cpu.ISA_OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    text = "model name\t: Some  CPU\nflags\t\t: fpu avx2 ht amx_bf16 avx512f rtm\n\nflags : sve\n"
    assert cpu.isa(text) == "amx_bf16 avx2 avx512f"
    assert cpu.model_name(text) == "Some CPU"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert cpu.isa(text) == "amx_bf16 avx2 avx512f ATEN_CPU_CAPABILITY=avx2"


def test_a_cpu_without_a_name_and_a_machine_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.model_name(ARM) == f"{platform.machine()} 0x41/0xd4f"
    assert cpu.isa(ARM).split()[:6] == ["asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve"]
    monkeypatch.setattr(cpu, "CPUINFO", Path("/nonexistent"))
    facts = collect("cpu")
    assert facts.hardware["name"]
    assert str(facts.hardware["isa"]).split()[0] == platform.machine()


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", ""])
def test_a_device_that_is_none(device: str) -> None:
    with pytest.raises(ValueError, match="device must be cpu, cuda or cuda:N, not"):
        collect(device)


def probe_says(monkeypatch: pytest.MonkeyPatch, output: str, status: int = 0, errors: str = "") -> None:
    """Make the probe's process print ``output``; the process itself is real."""
    real = subprocess.run
    code = f"import sys; sys.stdout.write({output!r}); sys.stderr.write({errors!r}); sys.exit({status})"

    def run(command: list[str], **options: object) -> object:
        return real([sys.executable, "-c", code], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(collecting.subprocess, "run", run)


H200: dict[str, dict[str, object]] = {
    "hardware": {
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "sm_count": 132,
        "memory_gib": 140,
        "l2_mib": 60,
        "power_limit_w": 700,
        "mig": False,
    },
    "software": {"cuda": "13.0", "driver": "580.159.03"},
    "informative": {"devices": 1},
}


def test_cuda_facts_have_exactly_the_binding_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_says(monkeypatch, "a driver's banner\n" + json.dumps(H200) + "\n")
    facts = collect("cuda")
    assert set(facts.hardware) == set(HARDWARE_KEYS["cuda"])
    assert set(facts.software) == set(SOFTWARE_KEYS["cuda"])
    monkeypatch.setattr(collecting, "has_nvidia_device", lambda: True)
    assert collect() == facts


def test_without_a_device_the_cpu_is_taken_and_cuda_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_says(monkeypatch, '{"error": "torch 2.13.0 finds no CUDA device"}\n')
    with pytest.raises(NoDevice, match="finds no CUDA device"):
        collect("cuda")
    monkeypatch.setattr(collecting, "has_nvidia_device", lambda: True)
    assert collect().device == "cpu"


@pytest.mark.parametrize(
    ("output", "status", "errors", "expected"),
    [
        (
            "",
            127,
            "x\nsymbol lookup error: cuInit\n",
            "ended with exit status 127: symbol lookup error: cuInit",
        ),
        ("", 1, "", "ended with exit status 1: no output"),
        ("[1]", 0, "", "the CUDA probe printed"),
        ("oops\n", 0, "", "ended with exit status 0"),
    ],
)
def test_a_probe_that_dies(
    monkeypatch: pytest.MonkeyPatch, output: str, status: int, errors: str, expected: str
) -> None:
    probe_says(monkeypatch, output, status, errors)
    with pytest.raises(HardwareError, match=expected) as caught:
        collect("cuda")
    assert not isinstance(caught.value, NoDevice)
    assert "\n" not in str(caught.value)


def test_a_probe_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def run(command: list[str], **options: object) -> object:
        return real([sys.executable, "-c", "import time; time.sleep(30)"], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(collecting.subprocess, "run", run)
    monkeypatch.setattr(collecting, "PROBE_TIMEOUT_S", 0.2)
    with pytest.raises(HardwareError, match="the CUDA probe did not answer"):
        collect("cuda")


def test_the_real_probe_on_this_machine() -> None:
    import torch

    if torch.cuda.is_available():
        assert collect("cuda").hardware["name"] == torch.cuda.get_device_name(0)
    else:
        with pytest.raises(NoDevice):
            collect("cuda")
        assert collect().device == "cpu"


class _NvmlError(Exception):
    value = 3


def fake_nvml(**calls: object) -> types.ModuleType:
    """NVML's Python binding with the functions given; the others raise as an unsupported query does."""

    def refuse(*_: object) -> object:
        raise _NvmlError

    module = types.ModuleType("pynvml")
    for name in (
        "nvmlInit",
        "nvmlShutdown",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetHandleByPciBusId",
        "nvmlDeviceGetPowerManagementLimit",
        "nvmlDeviceGetMigMode",
    ):
        setattr(module, name, calls.get(name, refuse))
    module.NVMLError = _NvmlError  # type: ignore[attr-defined]
    return module


def test_nvml_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        fake_nvml(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlSystemGetDriverVersion=lambda: b"580.159.03",
            nvmlDeviceGetHandleByPciBusId=lambda pci: asked.append(pci),
            nvmlDeviceGetPowerManagementLimit=lambda _: 700_000,
        ),
    )
    assert cuda_probe._nvml("00000000:1B:00.0") == {
        "power_limit_w": 700,
        "mig": False,  # the device has no MIG mode
        "driver": "580.159.03",
    }
    assert asked == [b"00000000:1B:00.0"]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())  # nvmlInit fails
    assert set(cuda_probe._nvml("0").values()) == {None}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert set(cuda_probe._nvml("0").values()) == {None}


def test_a_device_in_torch_s_and_nvml_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=150_121_545_728,
        L2_cache_size=60 * 2**20,
        pci_domain_id=0,
        pci_bus_id=0x1B,
        pci_device_id=0,
    )
    torch = types.SimpleNamespace(
        __version__="2.11.0+cu130",
        version=types.SimpleNamespace(cuda="13.0", git_version="70d9"),
        cuda=types.SimpleNamespace(
            is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda index: properties
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    asked: list[object] = []
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        fake_nvml(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlSystemGetDriverVersion=lambda: "580.159.03",
            nvmlDeviceGetHandleByPciBusId=lambda pci: asked.append(pci),
            nvmlDeviceGetPowerManagementLimit=lambda _: 700_000,
            nvmlDeviceGetMigMode=lambda _: (1, 1),
        ),
    )
    found = cuda_probe.probe(0)
    assert found["hardware"] == {**H200["hardware"], "mig": True}
    assert found["software"] == H200["software"]
    assert asked == [b"00000000:1B:00.0"]
    assert "there is no device cuda:1" in cuda_probe.probe(1)["error"]


PIN = "2d6a/fmha/trtllm-gen/"


def put(folder: Path, name: str, version: str, commit: str) -> Path:
    """A package as FlashInfer's build leaves it, which must not be imported."""
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "_build_meta.py").write_text(
        f'"""Build metadata."""\n__version__ = "{version}"\n__git_commit__ = "{commit}"\n'
    )
    (package / "artifacts.py").write_text(
        f"class ArtifactPath:\n    OTHER: str = 'x'\n    TRTLLM_GEN_FMHA: str = {PIN!r}\n"
    )
    return package


def put_checksums(folder: Path, text: str) -> None:
    (folder / PIN).mkdir(parents=True, exist_ok=True)
    (folder / PIN / "checksums.txt").write_text(text)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is searched for packages first, and an empty cache."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("FLASHINFER_CUBIN_DIR", raising=False)
    monkeypatch.delenv("FLASHINFER_DISABLE_VERSION_CHECK", raising=False)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "base"))
    return tmp_path


def test_flashinfer_is_read_and_not_imported(packages: Path) -> None:
    put(packages, "flashinfer", "0.7.2", "d84335d8")
    facts = flashinfer.flashinfer_facts()
    assert facts == {"flashinfer": "0.7.2", "flashinfer_commit": "d84335d8", "cubins": None}
    (packages / "flashinfer" / "_build_meta.py").write_text('__git_commit__ = "unknown"\n')
    facts = flashinfer.flashinfer_facts()
    assert facts["flashinfer_commit"] is None
    assert facts["flashinfer"] is not None  # None would say that it is not installed


def test_only_the_pinned_cubins_count(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(packages, "flashinfer", "0.7.2", "d84335d8")
    folder = packages / "somewhere"
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(folder))
    (folder / "other" / "gemm").mkdir(parents=True)
    (folder / "other" / "gemm" / "checksums.txt").write_text("11 gemm.cubin\n")
    assert flashinfer.cubins() is None
    put_checksums(folder, "00 kernel.cubin\n")
    first = flashinfer.cubins()
    assert first is not None
    assert len(first) == 16
    put_checksums(folder, "22 kernel.cubin\n")
    assert flashinfer.cubins() not in (None, first)


def test_cubins_come_from_where_flashinfer_takes_them(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(packages, "flashinfer", "0.7.2", "d84335d8")
    package = put(packages, "flashinfer_cubin", "0.7.1", "0")
    cache = packages / "base" / ".cache" / "flashinfer" / "cubins"
    assert flashinfer.cubin_folder() == cache  # another version's package is passed over
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    assert flashinfer.cubin_folder() == package / "cubins"
    monkeypatch.delenv("FLASHINFER_DISABLE_VERSION_CHECK")
    (package / "_build_meta.py").write_text('__version__ = "0.7.2"\n')
    assert flashinfer.cubin_folder() == package / "cubins"
    put_checksums(package / "cubins", "00 kernel.cubin\n")
    assert flashinfer.cubins() is not None


def test_no_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert flashinfer.flashinfer_facts() == {"flashinfer": None, "flashinfer_commit": None, "cubins": None}
