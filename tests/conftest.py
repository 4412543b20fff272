"""Shared by all tests: one torch thread, GPU tests skip without a GPU and are counted."""

from __future__ import annotations

import os

import pytest

# Children and libraries read these at start; two busy OpenMP threads on two shared cores stall for
# milliseconds at a time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA GPU where there is none."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
