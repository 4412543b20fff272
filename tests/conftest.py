"""Shared by all tests: one torch thread, GPU tests skip without a GPU and are counted."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

# Children and libraries read these at start; two busy OpenMP threads on two shared cores stall for
# milliseconds at a time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that starts the tests in the background leaves SIGINT ignored, and what we start inherits that: the
# tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA GPU where there is none."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and not _cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were left out, and for want of what: a green run says what it did not look at."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")
