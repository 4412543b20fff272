"""Small tables for tests, made by the real builder from decided cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from hypothesis import strategies as st

from autotune.domain.cell import Cell, Column
from autotune.domain.decision import Decision, Reason
from autotune.domain.dtypes import PROFILES, DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.domain.verdict import Status, Verdict
from autotune.table.build import DecidedCell, build_table
from autotune.table.model import Generated, Policy, Quarantine, RoutingTable, Unsafe
from autotune.table.source import sign

SHAPE = Shape(8, 1, 128, 16)
OTHER_SHAPE = Shape(8, 1, 128, 16, window_left=512)
DTYPES = PROFILES["bf16"]
FALLBACK = "torch-sdpa"
SPLIT = "torch-splitkv"
OTHER = "acme-decode"

FACTS = Facts(
    "cpu",
    {"name": "AMD EPYC", "cores": 2, "threads": 1, "isa": "AVX512"},
    {"torch": "2.13.0", "torch_commit": "1e5"},
    {"python": "3.11", "at": "2026-01-01", "numa": None, "turbo": True, "ghz": 2.5},
)
CUDA_FACTS = Facts(
    "cuda",
    {
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "sm_count": 132,
        "memory_gib": 140,
        "l2_mib": 50,
        "power_limit_w": 700,
        "mig": False,
    },
    {
        "flashinfer": "0.7.2",
        "flashinfer_commit": "12345678",
        "cubins": None,
        "cuda": "13.0",
        "driver": "580.159.03",
    },
)
GENERATED = Generated("autotune 0.1.0", "2026-11-29T12:00:00Z", "0123")
POLICY = Policy("generic", FALLBACK, "step", 0.03, 0.01, 0.05)
FAMILIES = {SPLIT: "decode", OTHER: "decode", FALLBACK: "context", "torch-eager": "context"}

FASTER = Decision(SPLIT, Reason.PROVEN_FASTER, "", 1.1234567, 1.3, 1.2)
FASTER_OTHER = Decision(OTHER, Reason.PROVEN_FASTER, "", 1.05, 1.1, None)
SLOWER = Decision(None, Reason.NOT_FASTER, vs_stock=1.0)
UNSAFE = Decision(None, Reason.CANDIDATE_UNSAFE)


def decided(
    batch: int,
    kv: tuple[int, int],
    decision: Decision,
    *,
    q_len: int = 4,
    interval: tuple[int, int] | None = None,
    shape: Shape = SHAPE,
    dtypes: DTypes = DTYPES,
    max_context: int = 4096,
    fallback: str = FALLBACK,
    requires: tuple[str, ...] = (),
    pad_value: int = 1,
    fallback_requires: tuple[str, ...] | None = None,
) -> DecidedCell:
    """One decided cell with a plausible proof behind a route."""
    column = Column(shape, dtypes, q_len, batch, max_context, interval, pad_value)
    verdict = Verdict(Status.SAFE, launches=100, checks=9, worst_error=0.004, requires=requires)
    return DecidedCell(
        Cell(column, *kv),
        decision,
        ("qwen @ attn_tp 4",),
        fallback,
        verdict if decision.route else None,
        0.003,
        fallback_requires,
    )


def table_of(
    cells: Sequence[DecidedCell],
    *,
    facts: Facts = FACTS,
    unsafe: Iterable[Unsafe] = (),
    quarantine: Iterable[Quarantine] = (),
    policy: Policy = POLICY,
) -> RoutingTable:
    """A table of these cells."""
    return build_table(
        cells,
        facts=facts,
        generated=GENERATED,
        policy=policy,
        families=FAMILIES,
        unsafe=unsafe,
        quarantine=quarantine,
    )


LOW, HIGH = (4, 1024), (1025, 4096)


def sample_cells() -> list[DecidedCell]:
    """Batches 1, 2, 4, 8 in two rows, an agreeing interval (2, 4) and a disagreeing one (4, 8)."""
    cells = [decided(batch, LOW, SLOWER if batch == 1 else FASTER) for batch in (1, 2, 4, 8)]
    cells += [decided(batch, HIGH, FASTER) for batch in (1, 2, 4, 8)]
    cells += [decided(3, LOW, FASTER, interval=(2, 4)), decided(3, HIGH, FASTER, interval=(2, 4))]
    cells += [decided(6, LOW, UNSAFE, interval=(4, 8)), decided(6, HIGH, FASTER, interval=(4, 8))]
    return cells


def sample() -> RoutingTable:
    """The table of :func:`sample_cells`, with an accusation."""
    accused = Unsafe(
        OTHER, "8/1/128 batch 6", "illegal_access", "at 0x7f, 'quoted'\nline", "autotune prove x"
    )
    return table_of(sample_cells(), unsafe=[accused])


_SIZES = (1, 2, 4, 8, 16)
_DECISIONS = (
    FASTER,
    FASTER,
    FASTER,
    FASTER_OTHER,
    SLOWER,
    UNSAFE,
    Decision(None, Reason.UNPROVEN),
    Decision(None, Reason.TOO_LARGE),
    Decision(None, Reason.NO_SAFE_ROUTE),
    Decision(None, Reason.QUARANTINED),
)


@st.composite
def cell_lists(draw: st.DrawFn) -> list[DecidedCell]:
    """Any study's outcome: cells missing, rows ragged or short of max context, intervals sampled or not."""
    cells: list[DecidedCell] = []
    for shape in draw(st.sampled_from(((SHAPE,), (SHAPE, OTHER_SHAPE)))):
        for q_len in draw(st.sampled_from(((4,), (1, 4)))):
            max_context = draw(st.sampled_from((300, 4096)))
            sizes = sorted(draw(st.sets(st.sampled_from(_SIZES), min_size=1)))
            columns: list[tuple[int, tuple[int, int] | None]] = [(size, None) for size in sizes]
            for low, high in pairwise(sizes):
                if high - low > 1:
                    inside = draw(st.sets(st.integers(low + 1, high - 1), max_size=2))
                    columns += [(batch, (low, high)) for batch in sorted(inside)]
            ends = sorted(draw(st.sets(st.integers(q_len, max_context), max_size=3)) | {max_context})
            likely = draw(st.sampled_from(_DECISIONS))
            for batch, interval in columns:
                low = q_len
                for end in ends:
                    if draw(st.integers(0, 9)):  # one in ten was never decided
                        decision = likely if draw(st.integers(0, 3)) else draw(st.sampled_from(_DECISIONS))
                        cells.append(
                            decided(
                                batch,
                                (low, end),
                                decision,
                                q_len=q_len,
                                interval=interval,
                                shape=shape,
                                max_context=max_context,
                                requires=draw(st.sampled_from(((), (), ("finite_pool",)))),
                                fallback_requires=draw(st.sampled_from((None, (), ("tail_padding_512",)))),
                            )
                        )
                    low = end + 1
    return cells


def edited(data: bytes, old: str, new: str, count: int = 1) -> bytes:
    """The table with ``old`` replaced, its digest computed again: what a forger would write."""
    body = data[: data.rindex(b"digest: ")].decode()
    assert old in body, old
    return sign(body.replace(old, new, count).encode())
