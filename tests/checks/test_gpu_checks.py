"""Every check on a GPU: the clean Triton kernel passes it, in the worker as in a proof."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotune.checks import registry
from autotune.checks.controls import CUDA, KV_LENS, SEED
from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import CheckStatus
from autotune.worker.jobs import ProveJob, prove
from autotune.worker.worker import Worker

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("cuda") as worker:
        yield worker


@pytest.mark.parametrize("column", [CUDA.interval, CUDA.one_kv_head, CUDA.scaled], ids=str)
@pytest.mark.parametrize("check", registry.names())
def test_clean_kernel_passes(worker: Worker, check: str, column: Column) -> None:
    job = ProveJob(
        route="planted-cuda-clean",
        check=check,
        column=column.to_dict(),
        facts=Facts("cuda", {}, {}).to_dict(),
        kv_lens=KV_LENS,
        seed=SEED,
        device="cuda",
        arena_kind="cuda_vmm",
    )
    row = prove(worker, job)
    assert row.status in (CheckStatus.PASSED, CheckStatus.NOT_APPLICABLE), row.detail
    assert row.requires == ()
