"""Tables edited at random and signed again: refused, or answered exactly as they read."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.router import Router
from autotune.table.dump import dump_table
from autotune.table.source import sign
from tests.table import samples

DATA = dump_table(samples.sample())
BODY = DATA[: DATA.rindex(b"digest: ")]
TOKENS = [b"s", b".", b"?", b"q", b"4", b"8192", b"1024", b"true", b"null", b'"', b"[", b"]", b"{", b"}"]
TOKENS += [b": ", b", ", b"\n", b" ", b"-", b"&a ", b"*a", b"!!", b"1.5", b"e", b"\xff", b"\0", b"\t", b"#"]
TOKENS += [b"---\n"]


@st.composite
def forgeries(draw: st.DrawFn) -> bytes:
    body = bytearray(BODY)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(body) - 1))
        cut = draw(st.integers(0, 3))
        kind = draw(st.integers(0, 2))
        if kind == 0:
            new = draw(st.sampled_from(TOKENS))
        elif kind == 1:
            new = draw(st.binary(max_size=2))
        else:
            other = draw(st.integers(0, len(body) - 1))
            new = bytes(body[other : other + draw(st.integers(1, 80))])
        body[start : start + cut] = new
    return sign(bytes(body))


def naive(router: Router, batch: int, kv: int | None) -> str | None:
    """What a person reads in the table's letters; None where it reads as the fallback."""
    table = router.table
    assert table is not None
    for entry in table.entries:
        if (entry.shape, entry.dtypes, entry.q_len) != (samples.SHAPE, samples.DTYPES, 4):
            continue
        if entry.max_context < 4096:
            continue
        grid, column = entry.routes, None
        if batch in entry.batch_size:
            column = entry.batch_size.index(batch)
        elif entry.eager:
            grid = entry.eager.routes
            for index, (low, high) in enumerate(entry.eager.intervals):
                if low < batch < high:
                    column = index
        if column is None:
            continue
        if kv is None:
            letter = grid.any[column]
        else:
            rows = [row for row in grid.rows if kv <= row.kv_high]
            letter = rows[0].letters[column] if rows and kv >= entry.q_len else "?"
        if (
            letter not in ".!?x#q"
            and not next(p for p in entry.proof if p.route == table.legend[letter]).requires
        ):
            return table.legend[letter]
    return None


@given(forgeries())
@settings(max_examples=300, deadline=None)
def test_a_forged_table_is_refused_or_says_what_it_reads(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.yaml"
        path.write_bytes(data)
        router = Router.load(path, facts=samples.FACTS)
    bound = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096)
    for batch in (1, 2, 3, 4, 5, 8, 9):
        for kv in (3, 4, 1024, 1025, 4096, 4097, None):
            proven = bound.proven(batch, 4, kv)
            if not router.status.active:
                assert proven is None
                assert bound.route(batch, 4, kv) == "fallback"
            elif kv is None or kv <= 4096:
                assert proven == naive(router, batch, kv)
