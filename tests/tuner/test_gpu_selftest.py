"""The self-test on a GPU: every planted fault seen as what it is."""

from __future__ import annotations

import pytest

from autotune.tuner.selftest import run_selftest
from autotune.worker.worker import Worker


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_every_planted_fault_is_detected_and_no_clean_kernel_accused() -> None:
    with Worker("cuda") as worker:
        test = run_selftest(worker, "cuda")
    assert test.ok, test.failures
    assert {"illegal_access", "misaligned", "hang", "finite_pool"} <= {result.got for result in test.results}
