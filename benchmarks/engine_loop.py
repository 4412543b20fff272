"""A decode loop of an engine through ``autotune.engines.flashinfer.install``: right, safe, and how fast.

    python benchmarks/engine_loop.py --table tuned_configs/nvidia-h200.sglang.yaml [--part soak|timing]
        [--seconds 300] [--timing-seconds 60] [--json FILE]

15 attention layers make a step; a step of each captured batch size is one CUDA graph. The loop replays them
with random lengths inside the table's rows, shuffled pages, garbage past the live ones, and sometimes a
smaller live batch whose rest is padded as the engine pads. All operands lie in guarded memory, K and V as the
halves of one allocation. Every few replays the outputs of one layer are compared with attention in fp32 over
the same pool. A fault of a kernel, or a wrong number, ends the run with exit 1 and names the step.

Then the time per step: ``install`` against stock (the library's own call), always-fallback and always-decode,
each captured, replayed in random order in one run; every captured size has as many rounds, or one more, where
``--timing-seconds`` end it. The two parts are two processes where other work shares the device with the
first. ``--seconds`` are those of the soak's steps; imports and captures come before them. ``--json`` is
written while the soak goes on and after each part; what a signal, or the end of its time, leaves of the last
one is told, marked as ``cut``, after a look at the canaries.

``--device cpu`` is a dry run of this file: no graph, plain Python, a stand-in for FlashInfer that computes in
fp32, the table's own facts taken for this machine's. Its times mean nothing.
"""

# ruff: noqa: T201 - what it prints is its result
from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.arena.factory import open_arena
from autotune.checks.oracle import bound
from autotune.cli.signals import Interrupted
from autotune.domain.cell import Column
from autotune.engines import flashinfer
from autotune.engines.choice import Choice
from autotune.engines.context_kernels import DEPLOYABLE
from autotune.engines.flashinfer import Hook
from autotune.engines.runtime import Runtime, collected
from autotune.hardware.errors import HardwareError
from autotune.router import Router
from autotune.routes.flashinfer.layout import hnd
from autotune.routes.flashinfer.masks import fill_causal_mask
from autotune.table.model import Entry
from benchmarks.ending import Pulse, ending

if TYPE_CHECKING:
    from autotune.arena.base import Arena

PARTS = ("soak", "timing")
MODES = ("install", "stock", "always-fallback", "always-decode")
WORKSPACE_BYTES = 512 << 20
ALIGN = 16
REPLAYS = 5  # of a graph, in a timed round
SETUP_S = 120.0  # for what comes before a part: modules, pools, captures


@dataclass(frozen=True)
class Settings:
    """What the command line says."""

    device: str
    layers: int
    batches: tuple[int, ...]
    max_kv: int
    seconds: float
    timing_seconds: float
    rounds: int
    verify_every: int
    guarded: bool
    seed: int
    parts: tuple[str, ...] = PARTS


class LoopError(Exception):
    """What ends the run, in one line; exit 1."""


class Forced:
    """A chooser that knows one answer: to time it."""

    def __init__(self, route: str | None) -> None:
        self._choice = Choice(route, "forced", "by the benchmark", decided=True)

    def choose(self, batch_size: int, q_len: int, max_kv_len: int | None = None) -> Choice:
        return self._choice

    def refused(self, batch_size: int, q_len: int, detail: str) -> Choice:
        raise RuntimeError(f"the benchmark's own metadata break the contract: {detail}")


class Engine:
    """Operands of one layer kind, in one arena; lengths and pages are written in place."""

    def __init__(self, entry: Entry, settings: Settings, allocate: Callable[..., torch.Tensor]) -> None:
        shape, self.entry, self.settings = entry.shape, entry, settings
        self.page, self.q_len = shape.page_size, entry.q_len
        most = max(settings.batches)
        self.width = -(-entry.max_context // self.page)
        self.pages_each = -(-settings.max_kv // self.page)
        # one page of the pool belongs to no request: rows that pad a batch point to it, as an engine's do
        pages = most * self.pages_each + 1
        self.chance = random.Random(settings.seed)
        self.generator = torch.Generator(settings.device).manual_seed(settings.seed)
        self.pools = []
        for layer in range(settings.layers):
            pool = allocate(
                f"kv{layer}", (2, pages, self.page, shape.num_kv_heads, shape.head_dim), torch.bfloat16
            )
            pool.normal_(generator=self.generator)
            self.pools.append(pool)
        rows = most * self.q_len
        heads = (rows, shape.num_qo_heads, shape.head_dim)
        self.query = allocate("q", heads, torch.bfloat16)
        self.outs = [allocate(f"out{layer}", heads, torch.bfloat16) for layer in range(settings.layers)]
        # one table and one set of lengths for each captured size: a graph reads its own, as wide as its batch
        self.tables = {
            size: allocate(f"table{size}", (size, self.width), torch.int32) for size in settings.batches
        }
        self.lens = {size: allocate(f"lens{size}", (size,), torch.int32) for size in settings.batches}
        self.masks = {}
        for size in settings.batches:
            mask = allocate(f"mask{size}", (size, self.q_len, 2 * -(-self.q_len // 32)), torch.uint16)
            fill_causal_mask(mask)
            self.masks[size] = mask
        self.workspace = allocate("workspace", (_workspace(settings.device),), torch.uint8)
        self.workspace[: min(8 << 20, self.workspace.numel())].zero_()
        # the context kernels' own: XQA's semaphores are in the other
        self.scratch = allocate("scratch", (_workspace(settings.device),), torch.uint8)
        self.owned: dict[int, list[list[int]]] = {}
        self.live: dict[int, list[int]] = {}
        for size in settings.batches:
            self.renew(size)

    def renew(self, size: int) -> None:
        """Other lengths, pages, queries; one time in four a smaller live batch."""
        chance, pages = self.chance, list(range(1, self.pools[0].shape[1]))
        chance.shuffle(pages)
        live = size if chance.random() < 0.75 else chance.randint(1, size)
        lens, table = [], torch.full((size, self.width), chance.choice((-1, 2**31 - 1, 0)), dtype=torch.int32)
        self.owned[size] = []
        for row in range(size):
            padded = row >= live
            kv_len = 1 if padded else chance.randint(self.q_len, self.settings.max_kv)
            count = -(-kv_len // self.page)
            own = [0] if padded else [pages.pop() for _ in range(count)]
            table[row, :count] = torch.tensor(own, dtype=torch.int32)
            lens.append(kv_len)
            self.owned[size].append(own)
        self.live[size] = lens[:live]
        self.tables[size].copy_(table)
        self.lens[size].copy_(torch.tensor(lens, dtype=torch.int32))
        self.query.normal_(generator=self.generator)

    def step(self, size: int) -> None:
        """All layers of one step, by whatever stands in FlashInfer now."""
        module: Any = sys.modules[flashinfer.MODULE]
        rows = size * self.q_len
        for layer, pool in enumerate(self.pools):
            module.trtllm_batch_decode_with_kv_cache(
                query=self.query[:rows],
                kv_cache=(hnd(pool[0]), hnd(pool[1])),
                workspace_buffer=self.workspace,
                block_tables=self.tables[size],
                seq_lens=self.lens[size],
                max_seq_len=self.entry.max_context,
                bmm1_scale=self.entry.shape.head_dim**-0.5,
                bmm2_scale=1.0,
                window_left=-1,
                out=self.outs[layer][:rows],
                q_len_per_req=self.q_len,
                mask=self.masks[size] if self.q_len > 1 else None,
            )

    def poison(self) -> None:
        """NaN wherever a step has to write."""
        for out in self.outs:
            out.fill_(float("nan"))

    def error(self, size: int, layer: int) -> float:
        """The largest relative error of any (row, head) of the live requests, against fp32."""
        shape, worst = self.entry.shape, 0.0
        k, v = self.pools[layer]
        for row, kv_len in enumerate(self.live[size]):
            ids = torch.tensor(self.owned[size][row], device=k.device)
            keys = k[ids].flatten(0, 1)[:kv_len].float().repeat_interleave(shape.group, 1)
            values = v[ids].flatten(0, 1)[:kv_len].float().repeat_interleave(shape.group, 1)
            mine = slice(row * self.q_len, (row + 1) * self.q_len)
            logits = torch.einsum("qhd,khd->hqk", self.query[mine].float(), keys) * shape.head_dim**-0.5
            at = torch.arange(kv_len, device=k.device)
            hidden = at[None] > torch.arange(kv_len - self.q_len, kv_len, device=k.device)[:, None]
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            right = torch.einsum("hqk,khd->qhd", weights, values)
            off = (self.outs[layer][mine].float() - right).norm(dim=-1) / right.norm(dim=-1)
            # NaN is larger than any bound
            worst = max(worst, float(off.nan_to_num(torch.inf).max()))
        return worst


def _workspace(device: str) -> int:
    return WORKSPACE_BYTES if device == "cuda" else 128 << 20


def replayable(engine: Engine, size: int, device: str) -> Callable[[], None]:
    """A step of ``size`` as a CUDA graph; on the CPU the step itself."""
    if device != "cuda":
        engine.step(size)  # as a capture asks the table once
        return lambda: engine.step(size)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # what is compiled or allocated at the first call must not be captured
            engine.step(size)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        engine.step(size)
    return graph.replay


@contextlib.contextmanager
def as_mode(mode: str, router: Router, engine: Engine, fallback: str) -> Iterator[Hook | None]:
    """FlashInfer as ``mode`` has it."""
    if mode == "stock":
        yield None
        return
    runtime = Runtime(router, engine="benchmark", attests=["causal_mask"])
    if mode != "install":
        forced: Any = Forced(fallback if mode == "always-fallback" else None)
        runtime.chooser = lambda *_, **__: forced  # type: ignore[method-assign]
        # no table said so: there is nothing that a later one could change
        runtime.recorded = lambda *_: None  # type: ignore[method-assign]
    hook = flashinfer.install(runtime)
    hook.scratch.give(engine.scratch)
    try:
        yield hook
    finally:
        hook.uninstall()


def soak(
    steps: dict[int, Callable[[], None]],
    engine: Engine,
    limit: float,
    settings: Settings,
    found: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """Replay with other lengths until the time is over; ``found`` says at any moment how far it came.

    Args:
        keep: called now and then.

    Raises:
        LoopError: a fault, or an error above ``limit``.
    """
    start = time.monotonic()
    end, pulse = start + settings.seconds, Pulse("engine_loop", start)
    found |= {"seconds": 0.0, "steps": 0, "launches": 0, "verified": 0, "worst_error": 0.0}
    while time.monotonic() < end or found["steps"] == 0:
        size = engine.chance.choice(settings.batches)
        engine.renew(size)
        check = found["steps"] % settings.verify_every == 0
        where = f"step {found['steps'] + 1}, batch {size}, lengths {engine.live[size]}"
        try:
            if check:
                engine.poison()
            steps[size]()
            if settings.device == "cuda":
                torch.cuda.synchronize()
            off = engine.error(size, engine.chance.randrange(settings.layers)) if check else 0.0
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise LoopError(f"{where}: {type(error).__name__}: {text}") from error
        found["seconds"] = round(time.monotonic() - start, 1)
        found["steps"] += 1
        found["launches"] += settings.layers
        if check:
            found["worst_error"], found["verified"] = max(found["worst_error"], off), found["verified"] + 1
            if not off <= limit:
                raise LoopError(f"{where}: error {off:.4g} exceeds {limit:.4g}")
        if pulse.beat(time.monotonic(), f"{found['steps']} steps, worst error {found['worst_error']:.4g}"):
            keep()
    found["seconds"] = round(time.monotonic() - start, 1)


def timed(step: Callable[[], None], device: str) -> float:
    """Microseconds of one step."""
    if device != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e6
    first: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    last: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(REPLAYS):
        step()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e3 / REPLAYS


def compare(
    steps: dict[str, dict[int, Callable[[], None]]],
    engine: Engine,
    settings: Settings,
    seen: dict[int, dict[str, list[float]]],
) -> None:
    """Rounds of every batch size in turn, until all are made or the time is over, into ``seen``."""
    end = time.monotonic() + settings.timing_seconds
    for at in range(settings.rounds + 1):
        for size in settings.batches:
            if at > 1 and time.monotonic() >= end:  # one that counts is made anyway
                return
            engine.renew(size)
            spent = {
                mode: timed(steps[mode][size], settings.device)
                for mode in engine.chance.sample(MODES, len(MODES))
            }
            if at:  # the first round warms up
                for mode, each in spent.items():
                    seen[size][mode].append(each)


def medians(seen: dict[int, dict[str, list[float]]]) -> dict[str, Any]:
    """Per batch size and mode the median time of a step, and the median of the rounds' ratios to stock.

    A round that was cut off has times of some modes only: it does not count.
    """
    whole = {size: min(map(len, times.values())) for size, times in seen.items()}
    return {
        str(size): {
            "rounds": whole[size],
            **{
                mode: {
                    "us": round(statistics.median(values[: whole[size]]), 2),
                    "stock_ratio": round(
                        statistics.median(s / v for s, v in zip(times["stock"], values, strict=False)), 4
                    ),
                }
                for mode, values in times.items()
            },
        }
        for size, times in seen.items()
        if whole[size]
    }


def pick(router: Router, heads: tuple[int, int, int], q_len: int) -> Entry:
    """The table's bf16 entry of these heads and ``q_len``."""
    table = router.table
    if table is None:
        raise SystemExit(f"engine_loop: {router.status.path}: {router.status.reason}")
    for entry in table.entries:
        shape = entry.shape
        if (
            (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim) == heads
            and entry.q_len == q_len
            and entry.dtypes.kv == entry.dtypes.q == "bf16"
            and shape.kv_layout == "fused-nhd"
            and shape.window_left == -1
        ):
            return entry
    raise SystemExit(f"engine_loop: {router.status.path} has no bf16 entry of heads {heads}, q_len {q_len}")


def run(
    entry: Entry,
    router: Router,
    settings: Settings,
    found: dict[str, Any],
    keep: Callable[[], None],
    allow: Callable[[float], None],
) -> None:
    """Capture, soak, time: whatever ``settings.parts`` ask for, into ``found``.

    Args:
        keep: called when a part is complete.
        allow: told how many seconds the next part may take.

    Raises:
        LoopError: a fault, a wrong number, or a table whose fallback cannot be called from a graph.
    """
    kind = ("cuda_vmm" if settings.device == "cuda" else "host_mmap") if settings.guarded else "plain"
    fallback = entry.fallback
    if fallback not in DEPLOYABLE:
        raise LoopError(f"the fallback {fallback} needs host work before each step")
    limit = bound(Column(entry.shape, entry.dtypes, entry.q_len, max(settings.batches), entry.max_context))
    counts: dict[str, dict[str, int]] = {}
    began = time.monotonic()
    found |= {"arena": kind, "error_bound": limit, "captured": counts}

    def parts(engine: Engine) -> None:
        steps: dict[str, dict[int, Callable[[], None]]] = {}

        def captured(mode: str) -> None:
            with as_mode(mode, router, engine, fallback) as hook:
                steps[mode] = {size: replayable(engine, size, settings.device) for size in settings.batches}
                if settings.device != "cuda":  # plain Python: the hook must stand while it runs
                    steps[mode] = {
                        size: _under(mode, router, engine, fallback, size) for size in settings.batches
                    }
                if hook is not None:
                    counts[mode] = {f"{route}: {why}": n for (route, why), n in hook.counts.items()}

        captured("install")
        found["setup_seconds"] = round(time.monotonic() - began, 1)
        if "soak" in settings.parts:
            allow(settings.seconds)
            soak(steps["install"], engine, limit, settings, found.setdefault("soak", {}), keep)
            keep()
        if "timing" in settings.parts:
            allow(SETUP_S)
            for mode in MODES:
                if mode not in steps:
                    captured(mode)
            seen: dict[int, dict[str, list[float]]] = {
                size: {mode: [] for mode in MODES} for size in settings.batches
            }
            allow(settings.timing_seconds)
            start = time.monotonic()
            try:
                compare(steps, engine, settings, seen)
            finally:
                found["timing_seconds"] = round(time.monotonic() - start, 1)
                found["per_step"] = medians(seen)
            keep()

    with open_arena(kind, settings.device) as arena:
        try:
            # what torch's allocator guarantees an engine is more; XQA and fmha-v2 ask for this much
            parts(Engine(entry, settings, lambda *what: arena.tensor(*what, align=ALIGN)))
        except Interrupted:
            try:
                _canaries(arena, found)
            except Exception as error:  # it is cut off all the same
                found["failed"] = _told(error)
            raise
        _canaries(arena, found)


def _canaries(arena: Arena, found: dict[str, Any]) -> None:
    """Say whether they are intact.

    Raises:
        LoopError: some are not.
    """
    overwritten = "; ".join(arena.overwritten())
    found["canaries"] = overwritten or "intact"
    if overwritten:
        raise LoopError(f"canaries were overwritten: {overwritten}")


def _told(error: Exception) -> str:
    name = "" if isinstance(error, LoopError) else f"{type(error).__name__}: "
    return f"{name}{' '.join(str(error).split())[:500]}"


def _under(mode: str, router: Router, engine: Engine, fallback: str, size: int) -> Callable[[], None]:
    def step() -> None:
        with as_mode(mode, router, engine, fallback):
            engine.step(size)

    return step


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--heads", default="8,1,128", metavar="Q,KV,DIM", help="per rank (default 8,1,128)")
    parser.add_argument("--q-len", type=int, default=4)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--batch", default="1,2,4,8,16", help="captured sizes (default 1,2,4,8,16)")
    parser.add_argument("--max-kv", type=int, default=16384, help="longest request (default 16384)")
    parser.add_argument("--part", choices=PARTS, help="only this one; both if left out")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the soak's steps (default 300)")
    parser.add_argument("--timing-seconds", type=float, default=60.0, help="of the timing (default 60)")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds a size (default 40)")
    parser.add_argument("--verify-every", type=int, default=10, metavar="N")
    parser.add_argument("--plain", action="store_true", help="ordinary memory, no guards")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    heads = tuple(int(part) for part in given.heads.split(","))
    settings = Settings(
        given.device,
        given.layers,
        tuple(int(part) for part in given.batch.split(",")),
        given.max_kv,
        given.seconds,
        given.timing_seconds,
        given.rounds,
        given.verify_every,
        not given.plain,
        given.seed,
        PARTS if given.part is None else (given.part,),
    )
    found: dict[str, Any] = {
        "device": given.device,
        "table": str(given.table),
        "heads": given.heads,
        "q_len": given.q_len,
        # whoever kills it leaves a file that says so
        "cut": "not finished",
    }

    def keep() -> None:
        if given.json is not None:  # a kill meanwhile leaves what was there
            partial = given.json.with_name(f"{given.json.name}.partial")
            partial.write_text(json.dumps(found, indent=1) + "\n")
            partial.replace(given.json)

    try:
        keep()
    except OSError as error:
        parser.error(f"--json {given.json}: {error.strerror or error}")
    with contextlib.ExitStack() as stack:
        if given.device == "cpu":
            from autotune.table.load import load_table
            from tests.engines import standin

            torch.set_num_threads(1)
            stack.enter_context(standin.installed())
            facts = load_table(given.table).facts
        else:
            import importlib

            try:
                importlib.import_module(flashinfer.MODULE)
                facts = collected()
            except (ImportError, HardwareError) as error:
                raise SystemExit(f"engine_loop: {' '.join(str(error).split())}") from None
        router = Router.load(given.table, facts=facts)
        if not router.status.active:
            raise SystemExit(f"engine_loop: {given.table}: {router.status.reason}")
        entry = pick(router, (heads[0], heads[1], heads[2]), given.q_len)
        if not entry.q_len <= settings.max_kv <= entry.max_context:
            raise SystemExit(f"engine_loop: --max-kv must lie in {entry.q_len}..{entry.max_context}")
        try:
            with ending("engine_loop", SETUP_S) as end:
                run(entry, router, settings, found, keep, end.allow)
            found["cut"] = end.why
        except Exception as error:  # whatever a library raises: what was found is told
            found |= {"cut": "", "failed": _told(error)}
        if "failed" in found:
            print(f"engine_loop: {found['failed']}", file=sys.stderr)
    if not found["cut"]:
        del found["cut"]
    print(json.dumps(found, indent=1), flush=True)
    keep()
    return int("failed" in found)


if __name__ == "__main__":
    sys.exit(main())
