"""Is this that GPU? By exact name and compute capability, and nothing else."""

from __future__ import annotations

import pytest

from autotune.domain.fingerprint import Facts, Scalar
from autotune.hardware import (
    DeviceProfile,
    WrongMachine,
    architecture_of,
    collect,
    describe,
    present,
    require,
)
from autotune.hardware.cpu import cpu_facts
from autotune.space import load_profile, profiles


def cuda(name: str, capability: str, **hardware: int) -> Facts:
    facts: dict[str, Scalar] = {"name": name, "compute_capability": capability, "sm_count": 132}
    return Facts("cuda", {**facts, "power_limit_w": 700, **hardware}, {})


@pytest.mark.parametrize(
    ("profile", "name", "capability"),
    [
        ("h200", "NVIDIA H20", "9.0"),
        ("h200", "NVIDIA H200 NVL", "9.0"),
        ("h200", "NVIDIA H100 80GB HBM3", "9.0"),
        ("h200", "nvidia h200", "9.0"),
        ("h200", "NVIDIA H200", "10.0"),
        ("b300", "NVIDIA GB300", "10.3"),
        ("gb300", "NVIDIA B300 SXM6 AC", "10.3"),
        ("b200", "NVIDIA GB200", "10.0"),
        ("gb200", "NVIDIA B200", "10.0"),
    ],
)
def test_a_similar_name_is_another_machine(profile: str, name: str, capability: str) -> None:
    facts = cuda(name, capability)
    with pytest.raises(WrongMachine) as caught:
        require(load_profile(profile).device, facts)
    text = str(caught.value)
    assert "\n" not in text
    assert f"--gpu {profile} asks for NVIDIA " in text
    assert f"this machine has {name} (compute capability {capability}, 132 SMs)" in text
    assert "`plan`, `show`, `explain` and `export` work here" in text
    assert caught.value.exit_code == 3


def test_the_exact_device_is_accepted_whatever_its_limits() -> None:
    device = load_profile("h200").device
    for facts in (
        cuda("NVIDIA H200", "9.0"),
        cuda("NVIDIA H200", "9.0", power_limit_w=500),
        cuda("NVIDIA H200", "9.0", sm_count=60),
    ):
        assert require(device, facts) is facts


def test_every_profile_accepts_its_own_names_and_no_other_profile_does() -> None:
    devices = {name: load_profile(name).device for name in profiles() if name != "cpu"}
    for owner, device in devices.items():
        for name in device.names:
            facts = cuda(name, device.compute_capability)
            assert [other for other, profile in devices.items() if profile.matches(facts)] == [owner]


def test_this_machine() -> None:
    import torch

    facts = require(load_profile("cpu").device)
    assert facts == collect("cpu", threads=1)
    cores = facts.hardware["cores"]
    assert describe(facts) == f"CPU: {facts.hardware['name']}, {cores} core{'s' if cores != 1 else ''}"
    if not torch.cuda.is_available():
        with pytest.raises(WrongMachine) as caught:
            require(load_profile("gb300").device)
        assert "no CUDA device; CPU: " in str(caught.value)
        assert present() == f"no CUDA device; {describe(facts)}"


def test_cpu_facts_never_open_a_gpu_profile_nor_the_other_way_round() -> None:
    with pytest.raises(WrongMachine):
        require(load_profile("h200").device, cpu_facts())
    with pytest.raises(WrongMachine):
        require(load_profile("cpu").device, cuda("NVIDIA H200", "9.0"))


def test_a_profile_that_means_nothing() -> None:
    with pytest.raises(ValueError, match="kind must be cpu or cuda"):
        DeviceProfile("x", "rocm")
    with pytest.raises(ValueError, match="needs device names"):
        DeviceProfile("x", "cuda", (), "9.0")
    with pytest.raises(ValueError, match="must be major"):
        DeviceProfile("x", "cuda", ("X",), "9")
    assert [architecture_of(cc) for cc in ("9.0", "10.0", "10.3", "12.0")] == [
        "sm90",
        "sm100",
        "sm103",
        "sm120",
    ]
