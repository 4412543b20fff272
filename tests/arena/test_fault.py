"""Real faults in real processes: a stray access dies of SIGSEGV and says where it struck.

One process imports torch and forks a child for each case, since importing it is most of a case's time.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.arena import fault, regions
from autotune.arena.base import ArenaError, Placement
from autotune.arena.host_mmap import HostMmapArena

torch.set_num_threads(1)


def view(address: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``count`` elements at ``address``, whatever is there: torch's bounds checks believe it."""
    buffer = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count)


def dies(body: Callable[[], object]) -> tuple[int, dict[str, Any] | None]:
    """Run ``body`` in a forked child: the signal that killed it (0: none) and the handler's line."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(20)
            faulthandler.disable()
            os.close(read)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            fault.install(write)
            body()
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:  # noqa: PTH123 - a descriptor
        lines = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    assert len(lines) <= 1
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, json.loads(lines[0]) if lines else None


@pytest.mark.parametrize("access", ["read", "write"])
@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_element_outside_is_a_located_segfault(
    access: str, placement: Placement, dtype: torch.dtype
) -> None:
    with HostMmapArena(placement) as arena:
        arena.tensor("q", (100,), dtype)
        start = arena.tensor("out", (100,), dtype).data_ptr()
        end, first = start + 100 * dtype.itemsize, start - dtype.itemsize
        stray = view(start if placement is Placement.TAIL else first, 101, dtype)
        died, line = dies(lambda: stray.sum() if access == "read" else stray.fill_(1.0))
    assert died == signal.SIGSEGV
    # the processor names the first byte that it could not reach
    assert line == {
        "signal": "SIGSEGV",
        "address": end if placement is Placement.TAIL else first,
        "inside_hole": True,
        "operand": "out",
        "offset": 0 if placement is Placement.TAIL else -dtype.itemsize,
    }


def test_an_access_inside_survives() -> None:
    for placement in Placement:
        with HostMmapArena(placement) as arena:
            operand = arena.tensor("out", (100,), torch.float32)
            assert dies(functools.partial(operand.fill_, 1.0)) == (0, None)


def test_slack_moves_the_fault_back() -> None:
    with HostMmapArena(slack=8) as arena:
        start = arena.tensor("q", (10,), torch.float32).data_ptr()
        assert dies(lambda: view(start, 12).sum()) == (0, None)
        died, line = dies(lambda: view(start, 13).sum())
        assert (died, line and line["operand"], line and line["offset"]) == (signal.SIGSEGV, "q", 8)


def test_a_wild_page_number_is_still_ours() -> None:
    with HostMmapArena() as arena:
        pool = arena.tensor("kv_cache", (4, 16, 128), torch.float32)
        wild = pool.data_ptr() + 1_000_000_007 * 8192
        died, line = dies(lambda: view(wild, 2048).sum())
        assert died == signal.SIGSEGV
        assert line is not None and (line["address"], line["operand"]) == (wild, "kv_cache")
        assert line["offset"] == wild - pool.data_ptr() - 4 * 8192


def test_elsewhere_is_not_ours() -> None:
    with HostMmapArena() as arena:
        arena.tensor("q", (10,), torch.float32)
        died, line = dies(lambda: ctypes.memset(64, 0, 1))
    assert died == signal.SIGSEGV
    assert line == {
        "signal": "SIGSEGV",
        "address": 64,
        "inside_hole": False,
        "operand": None,
        "offset": None,
    }


def test_use_after_leaving_is_a_fault_outside() -> None:
    with HostMmapArena() as arena:
        tensor = arena.tensor("q", (10,), torch.float32)
    died, line = dies(lambda: tensor.sum())
    assert died == signal.SIGSEGV
    assert line is not None and not line["inside_hole"] and line["address"] == tensor.data_ptr()


def test_a_signal_that_was_sent_has_no_address() -> None:
    died, line = dies(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    assert died == signal.SIGSEGV
    assert line is not None and line["address"] == 0 and not line["inside_hole"]


def test_other_deaths_write_nothing() -> None:
    assert dies(os.abort) == (signal.SIGABRT, None)


def test_a_fault_in_a_second_thread_is_located() -> None:
    import threading

    with HostMmapArena() as arena:
        start = arena.tensor("v_cache", (16,), torch.float32).data_ptr()

        def body() -> None:
            thread = threading.Thread(target=lambda: view(start, 17).sum())
            thread.start()
            thread.join()

        died, line = dies(body)
    assert died == signal.SIGSEGV
    assert line is not None and line["address"] == start + 64 and line["operand"] == "v_cache"


def test_a_bus_error_is_told_apart() -> None:
    import mmap
    import tempfile

    def body() -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(4096)
            area = mmap.mmap(file.fileno(), 4096)
            address = ctypes.addressof(ctypes.c_char.from_buffer(area))
            file.truncate(0)
            ctypes.string_at(address, 1)

    died, line = dies(body)
    assert died == signal.SIGBUS
    assert line is not None and line["signal"] == "SIGBUS" and not line["inside_hole"]


def test_the_site_reads_plainly() -> None:
    with HostMmapArena() as arena:
        end = arena.tensor("page_table", (8,), torch.int32).data_ptr() + 32
        assert str(fault.describe(end + 4)) == "page_table: 4 bytes past the end"
        assert fault.describe(end - 4) is None
        (region,) = [region for region in regions._live.values() if region.name == "page_table"]
        site = fault.describe(region.body_start - 1)
        assert site is not None and site.offset == region.body_start - 1 - region.start
        assert str(site).endswith("bytes before the start")
    assert fault.describe(end) is None


def test_a_fresh_process_needs_only_install() -> None:
    code = (
        "import os, torch\n"
        "from autotune.arena import fault\n"
        "from autotune.arena.host_mmap import HostMmapArena\n"
        "import ctypes\n"
        "fault.install(1)\n"
        "arena = HostMmapArena()\n"
        "t = arena.tensor('q', (3,), torch.float32)\n"
        "b = (ctypes.c_ubyte * 16).from_address(t.data_ptr())\n"
        "torch.frombuffer(b, dtype=torch.float32).add_(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV
    line = json.loads(done.stdout)
    assert (line["operand"], line["offset"], line["inside_hole"]) == ("q", 0, True)


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ArenaError, match="64-bit Linux"):
        fault.install(1)
    with pytest.raises(ArenaError, match="needs Linux"):
        HostMmapArena()
