"""The real compute-sanitizer on planted kernels of this GPU, where it works."""

from __future__ import annotations

import pytest

from autotune.checks.controls import CUDA
from autotune.domain.fingerprint import Facts
from autotune.sanitizer import tool
from autotune.sanitizer.examine import Ended, Examined, examine
from autotune.tuner.prover import repro_command
from autotune.worker.jobs import ProveJob

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


def look(route: str) -> Examined:
    path = tool.find()
    if path is None:
        pytest.skip("compute-sanitizer is not installed")
    job = ProveJob(
        route=route,
        check="reference",
        column=CUDA.usual.to_dict(),
        facts=Facts("cuda", {}, {}).to_dict(),
        kv_lens=(64, 300),
        seed=7,
        device="cuda",
        arena_kind="cuda_vmm",
    )
    found = examine(path, repro_command(job))
    if found.ended is Ended.REFUSED:
        pytest.skip(found.said)
    return found


@pytest.mark.parametrize(
    ("route", "access", "kernel", "misaligned"),
    [
        ("planted-cuda-write-past-end", "write", "poke", False),
        ("planted-cuda-read-past-end", "read", "poke", False),
        ("planted-cuda-misaligned", "read", "misaligned", True),
    ],
)
def test_a_planted_fault_is_named(route: str, access: str, kernel: str, misaligned: bool) -> None:
    found = look(route)
    assert found.ended is Ended.FOUND, found.note
    assert found.first is not None
    assert (found.first.access, found.first.space) == (access, "global")
    assert found.first.kernel.startswith(kernel)
    assert found.first.misaligned == misaligned
    if not misaligned:
        assert found.first.nearest is not None
        assert found.first.nearest.side == "after"


def test_a_clean_kernel_has_no_finding() -> None:
    found = look("planted-cuda-clean")
    assert found.ended is Ended.NOTHING, found.note
