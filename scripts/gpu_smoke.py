"""Try the guarded memory, every check and every control on this machine's GPU; a table comes last.

    python scripts/gpu_smoke.py [--only CHECK] [--skip-selftest]

Nothing stops at the first failure. With OUT set, the details go to $OUT/gpu_smoke.json. Exit 1 if anything is
not as it must be.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
# a module that was not prebuilt would be compiled for minutes
os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")

# Each runs in a process of its own: some end in a fault, and the allocator must come before CUDA.
PIECES = {
    "arena: map, fill, canary": """
from autotune.arena.base import Placement
from autotune.arena.factory import open_arena
from autotune.arena.cuda_vmm import bytes_at
for placement in Placement:
    with open_arena("cuda_vmm", "cuda", placement, 512) as arena:
        x = arena.tensor("x", (64,), torch.float32)
        x.fill_(2.0)
        assert float(x.sum()) == 128.0
        assert arena.overwritten() == [], arena.overwritten()
        bytes_at(x.data_ptr() + 256 + 4, 2).zero_()
        assert arena.overwritten() == ["x: 2 bytes after the end, from offset 4"], arena.overwritten()
print("ok")
""",
    "arena: 100 times 20 operands": """
from autotune.arena.factory import open_arena
start = time.perf_counter()
for round_ in range(100):
    with open_arena("cuda_vmm", "cuda") as arena:
        for index in range(20):
            arena.tensor(f"t{index}", (1000 + round_,), torch.uint8)
        arena.tensor("kv_cache", (1 << 24,), torch.uint8)
print(f"ok {(time.perf_counter() - start) * 10:.1f} ms an arena")
""",
    "arena: read past the end faults": """
from autotune.arena.factory import open_arena
from autotune.arena.cuda_vmm import bytes_at
arena = open_arena("cuda_vmm", "cuda")
x = arena.tensor("x", (4096,), torch.uint8)
x.fill_(1)
torch.cuda.synchronize()
try:
    bytes_at(x.data_ptr(), 4096 + 64).to(torch.int32).sum()
    torch.cuda.synchronize()
    print("no fault")
except Exception as error:
    print("ok" if "illegal memory access" in str(error) else f"{type(error).__name__}: {error}")
""",
    "allocator: plain and guarded": """
x = torch.randn(257, 129, device="cuda")
for _ in range(50):
    y = (x @ x.T).softmax(-1)
torch.cuda.synchronize()
assert torch.allclose(y.sum(-1), torch.ones(257, device="cuda"))
assert state.guarded_total == 0
with cuda_allocator.guarding():
    z = torch.empty(1000, dtype=torch.uint8, device="cuda")
assert state.guarded_total == 1 and state.live[z.data_ptr()].mapping is not None
del z
start = time.perf_counter()
for _ in range(1000):
    torch.empty(1000, device="cuda")
plain = (time.perf_counter() - start) * 1000
with cuda_allocator.guarding():
    start = time.perf_counter()
    for _ in range(100):
        torch.empty(1000, device="cuda")
    guarded = (time.perf_counter() - start) * 1e4
print(f"ok {plain:.1f} us plain, {guarded:.0f} us guarded")
""",
    "allocator: captured graph": """
x, out = torch.ones(1000, device="cuda"), torch.empty(1000, device="cuda")
def work():
    a = x * 2
    b = a + 1
    out.copy_(b * a)
work()
torch.cuda.synchronize()
with cuda_allocator.holding():
    graph = torch.cuda.CUDAGraph()
    with cuda_allocator.guarding(), torch.cuda.graph(graph, capture_error_mode="relaxed"):
        work()
    x.fill_(3)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert float(out.sum()) == 42000.0, float(out.sum())
    graph.reset()
print(f"ok {state.guarded_total} guarded")
""",
    "allocator: overrun faults": """
from autotune.arena.cuda_vmm import bytes_at
with cuda_allocator.guarding():
    z = torch.zeros(1024, dtype=torch.uint8, device="cuda")
try:
    bytes_at(z.data_ptr(), 1025).to(torch.int32).sum()
    torch.cuda.synchronize()
    print("no fault")
except Exception as error:
    print("ok" if "illegal memory access" in str(error) else f"{type(error).__name__}: {error}")
""",
}
BEFORE = "import os, sys, time, torch\n"
WITH_ALLOCATOR = (
    "from autotune.arena import cuda_allocator\n"
    "cuda_allocator.install()\n"
    "state = cuda_allocator.installed()\n"
)


@dataclass
class Log:
    """What is printed and written."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, ok: bool, seconds: float, said: str, **more: Any) -> None:
        self.rows.append({"what": what, "ok": ok, "seconds": round(seconds, 2), "said": said, **more})
        print(f"{'ok ' if ok else 'BAD'} {seconds:6.2f} s  {what}: {said[:400]}", flush=True)

    def attempt(self, what: str, action: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            action()
        except Exception as error:
            traceback.print_exc()
            self.add(what, False, time.perf_counter() - start, f"{type(error).__name__}: {error}")


def pieces(log: Log) -> None:
    for what, code in PIECES.items():
        start = time.perf_counter()
        prefix = BEFORE + (WITH_ALLOCATOR if what.startswith("allocator") else "")
        done = subprocess.run(
            [sys.executable, "-c", f"{prefix}{code}\nsys.stdout.flush(); os._exit(0)"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        last = (done.stdout.strip() or done.stderr.strip() or f"exit {done.returncode}").splitlines()[-1]
        ok = done.returncode == 0 and done.stdout.startswith("ok")
        log.add(what, ok, time.perf_counter() - start, last, stderr=done.stderr[-2000:])


def checks(log: Log, worker: Any, facts: Any, only: str | None) -> None:
    from autotune.checks import registry
    from autotune.checks.controls import CUDA, KV_LENS, SEED
    from autotune.domain.verdict import CheckStatus
    from autotune.worker.jobs import ProveJob, run_check

    for name in registry.names():
        if only not in (None, name):
            continue
        column = CUDA.scaled if name == "scales" else CUDA.interval
        job = ProveJob(
            "planted-cuda-clean",
            name,
            column.to_dict(),
            facts.to_dict(),
            KV_LENS,
            SEED,
            "cuda",
            "cuda_vmm",
        )
        start = time.perf_counter()
        row = run_check(worker, job)
        seconds = time.perf_counter() - start
        ok = row.status is CheckStatus.PASSED and not row.requires
        error = "" if row.worst_error is None else f", worst error {row.worst_error:.4f}"
        rate = f"{row.launches} launches, {1000 * seconds / max(1, row.launches):.1f} ms each{error}"
        said = rate if ok else f"{row.status.value} {row.kind} {row.reason} {row.requires} {row.detail}"
        log.add(f"clean {name}", ok, seconds, said, row=row.to_dict())


def selftest(log: Log, worker: Any, facts: Any, only: str | None) -> None:
    from autotune.tuner.selftest import run_selftest

    last = time.perf_counter()

    def told(result: Any) -> None:
        nonlocal last
        now = time.perf_counter()
        said = result.got if result.ok else f"got {result.got}, wanted {result.expected}: {result.detail}"
        log.add(f"{result.check} {result.control}", result.ok, now - last, said, row=result.to_dict())
        last = now

    run_selftest(worker, "cuda", only=only, facts=facts, on_result=told)


def facts_of() -> Any:
    from autotune.domain.fingerprint import Facts
    from autotune.hardware.collect import collect

    try:
        return collect("cuda")
    except Exception as error:
        print(f"no facts ({type(error).__name__}: {error}): FlashInfer's control is left out")
        return Facts("cuda", {}, {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", help="one check")
    parser.add_argument("--skip-selftest", action="store_true")
    arguments = parser.parse_args()
    log, begin = Log(), time.perf_counter()
    if arguments.only is None:
        log.attempt("pieces", lambda: pieces(log))
    facts = facts_of()
    try:
        from autotune.worker.worker import Worker

        # without it one control fails ("library-overrun"), not all of them
        guard = all(row["ok"] for row in log.rows if row["what"].startswith("allocator"))
        with Worker("cuda", guard_allocations=guard) as worker:
            log.attempt("checks", lambda: checks(log, worker, facts, arguments.only))
            if not arguments.skip_selftest:
                log.attempt("selftest", lambda: selftest(log, worker, facts, arguments.only))
    except Exception as error:
        traceback.print_exc()
        log.add("worker", False, 0.0, f"{type(error).__name__}: {error}")
    if out := os.environ.get("OUT"):
        (Path(out) / "gpu_smoke.json").write_text(json.dumps(log.rows, indent=1))
    bad = [row for row in log.rows if not row["ok"]]
    print(f"\n{len(log.rows)} tried, {len(bad)} not as they must be, {time.perf_counter() - begin:.1f} s")
    slowest = sorted(log.rows, key=lambda row: -row["seconds"])[:6]
    print("slowest: " + "; ".join(f"{row['what']} {row['seconds']} s" for row in slowest))
    for row in bad:
        print(f"BAD {row['what']}: {row['said'][:600]}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
