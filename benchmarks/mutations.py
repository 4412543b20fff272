"""Damaged table files: ``python benchmarks/mutations.py [--count N] [--seed N] [--json]``.

Makes N files (100,000 if left out) from sound tables: flipped bits, cut and joined ends, bytes moved, text
edited as a hand or an attacker would, half of the edited ones with their digest computed again. Each goes
through ``Router.load``, ``bind`` and every kind of look-up. Counted, and none may be:

* exceptions out of the router;
* a file whose digest does not fit its bytes, and that is answered with another kernel than the fallback;
* a file with a right digest whose answers differ from what its letters say.

Exit 1 if there was one. Files are written to a temporary folder, so that the reading side is the real one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.router import Router
from autotune.table.letters import RESERVED
from autotune.table.model import RoutingTable
from autotune.table.quarantine import apply_quarantine
from autotune.table.source import sign

TOKENS = (
    *(
        b'"',
        b"'",
        b"[",
        b"]",
        b"{",
        b"}",
        b": ",
        b", ",
        b"\n",
        b"- ",
        b"  ",
        b"\t",
        b"#",
        b"\0",
        b"\xff",
        b"\r",
    ),
    *(
        b"&a ",
        b"*a",
        b"!!str ",
        b"!!python/object/apply:os.system ",
        b"<<: ",
        b"---\n",
        b"...\n",
        b"|\n",
        b"? ",
    ),
    *(b"null", b"true", b".inf", b"1e999", b"-1", b"0", b"9" * 400, b"1.5", b"~0", b"2026-01-01", b"0x10"),
    *(b"any", b"q_len: 1", b"max_context: 1048576", b"batch_size: [1, 1]", b"\xe2\x80\xa8", b"\xef\xbb\xbf"),
)
LETTERS = b".!?x#qsdofabetrg"


@dataclass(frozen=True)
class Seed:
    """A sound table's bytes, the facts that open it, and what to ask."""

    data: bytes
    facts: Facts
    keys: tuple[tuple[Shape, DTypes, int], ...]
    queries: tuple[tuple[int, int, int | None], ...]


def mutations(data: bytes, chance: random.Random) -> Iterator[bytes]:
    """Endless damaged copies of a table."""
    body = data[: data.rindex(b"digest: ")]
    while True:
        kind = chance.randrange(8)
        changed = bytearray(data)
        if kind == 0:
            for _ in range(chance.choice((1, 1, 1, 2, 8))):
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del changed[chance.randrange(len(changed)) :]
        elif kind == 2:
            start = chance.randrange(len(changed))
            del changed[start : start + chance.choice((1, 2, 16, 300))]
        elif kind == 3:
            changed += bytes(chance.randrange(256) for _ in range(chance.randrange(1, 40)))
        else:
            changed = edited(bytearray(body), chance)
            # Half of them by someone who knows how the digest is made.
            yield sign(bytes(changed)) if kind % 2 else bytes(changed) + data[len(body) :]
            continue
        yield bytes(changed)


def edited(body: bytearray, chance: random.Random) -> bytearray:
    """One to three edits of the text: tokens, whole lines, letters and numbers."""
    for _ in range(chance.randrange(1, 4)):
        start = chance.randrange(len(body))
        kind = chance.randrange(5)
        if kind == 0:
            body[start : start + chance.randrange(4)] = chance.choice(TOKENS)
        elif kind == 1:  # a piece of elsewhere
            other = chance.randrange(len(body))
            body[start : start + chance.randrange(4)] = body[other : other + chance.randrange(1, 80)]
        elif kind == 2:  # a line twice, or gone
            lines = bytes(body).splitlines(keepends=True)
            index = chance.randrange(len(lines))
            lines[index : index + 1] = [] if chance.random() < 0.5 else [lines[index]] * 2
            body = bytearray(b"".join(lines))
        elif kind == 3:  # a letter of a row
            if (row := body.find(b'": "', start)) >= 0 and row + 4 < len(body):
                body[row + 4] = chance.choice(LETTERS)
        elif (digit := next((i for i in range(start, len(body)) if 48 <= body[i] <= 57), -1)) >= 0:
            body[digit] = 48 + chance.randrange(10)
        if not body:
            body = bytearray(b"\n")
    return body


def intact(data: bytes) -> bool:
    """Whether the last line is the digest of all bytes before it: written again here, on purpose."""
    body, mark, last = data.rpartition(b'digest: "sha256:')
    return bool(mark) and last == hashlib.sha256(body).hexdigest().encode() + b'"\n'


def read_by_eye(
    table: RoutingTable, key: tuple[Shape, DTypes, int], query: tuple[int, int, int | None]
) -> str | None:
    """The route that the letters name for a call, without the router; None where they name none."""
    shape, dtypes, context = key
    batch, q_len, kv = query
    fitting = [
        entry
        for entry in apply_quarantine(table).entries
        if (entry.shape, entry.dtypes, entry.q_len) == (shape, dtypes, q_len)
        and entry.q_len <= context <= entry.max_context
    ]
    least = min((entry.max_context for entry in fitting), default=0)
    for entry in fitting:
        if entry.max_context != least:
            continue
        grid, column = entry.routes, None
        if batch in entry.batch_size:
            column = entry.batch_size.index(batch)
        elif entry.eager is not None:
            grid = entry.eager.routes
            for index, (low, high) in enumerate(entry.eager.intervals):
                column = index if low < batch < high else column
        if column is None:
            continue
        if kv is None:
            letter = grid.any[column]
        elif not q_len <= kv <= context:
            return None
        else:
            letter = next((row.letters[column] for row in grid.rows if kv <= row.kv_high), ".")
        name = table.legend[letter]
        proofs = {proof.route: proof for proof in entry.proof}
        return None if letter in RESERVED or proofs[name].requires else name
    return None


def examine(path: Path, seed: Seed, data: bytes) -> tuple[str, bool]:
    """What was wrong about the router's answers to one file, and whether it was in use."""
    path.write_bytes(data)
    try:
        router = Router.load(path, facts=seed.facts)
        table, active = router.table, router.status.active
        for key in seed.keys:
            bound = router.bind(key[0], key[1], max_context=key[2])
            for query in seed.queries:
                proven, use_decode = bound.proven(*query), bound.use_decode(*query)
                answer = bound.route(*query)
                if proven is None and use_decode:
                    return f"use_decode without a proven route at {query}", active
                if proven is not None and answer != proven:
                    return f"route() {answer} is not the proven {proven} at {query}", active
                if active and table is not None and proven != read_by_eye(table, key, query):
                    return f"answered {proven} at {query}, the letters say otherwise", active
                if proven is not None and not active:
                    return f"answered {proven} while inactive", active
        if active and not intact(data):
            return "in use although its digest does not fit", active
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    return "", active


def seeds() -> list[Seed]:
    """The test suite's sample table, and a shipped one cut down to its first entries."""
    from dataclasses import replace

    from autotune.table.dump import dump_table
    from autotune.table.load import load_table

    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, it sees its own folder only
    from tests.table import samples

    sample = samples.sample()
    queries = tuple((batch, 4, kv) for batch in (1, 2, 3, 5, 8, 9) for kv in (3, 4, 1025, 4096, None))
    found = [Seed(dump_table(sample), sample.facts, ((samples.SHAPE, samples.DTYPES, 4096),), queries)]
    for path in sorted((Path(__file__).parents[1] / "tuned_configs").glob("*.yaml"))[:1]:
        table = load_table(path)
        few = replace(table, entries=table.entries[:2], unsafe=())
        keys = tuple((entry.shape, entry.dtypes, entry.max_context) for entry in few.entries[:1])
        calls = tuple((batch, few.entries[0].q_len, kv) for batch in (1, 4, 100) for kv in (1, 5000, None))
        found.append(Seed(dump_table(few), few.facts, keys, calls))
    return found


def run(count: int, seed: int) -> dict[str, object]:
    """Examine ``count`` files; the figures, and what was wrong about the first wrong ones."""
    logging.getLogger("autotune.router").setLevel(logging.CRITICAL)
    chance = random.Random(seed)
    pairs = [(each, mutations(each.data, chance)) for each in seeds()]
    used = unusable = 0
    wrong: list[str] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.yaml"
        for index in range(count):
            source, stream = pairs[index % len(pairs)]
            problem, active = examine(path, source, next(stream))
            if problem and len(wrong) < 20:
                wrong.append(f"file {index}: {problem}")
            used += active
            unusable += not active
    seconds = round(time.perf_counter() - start, 1)
    return {
        "files": count,
        "seed": seed,
        "in use": used,
        "refused": unusable,
        "seconds": seconds,
        "wrong": wrong,
    }


def main() -> int:
    """Print the figures; exit 1 if the router was wrong about any file."""
    parser = argparse.ArgumentParser(description="What the router makes of damaged table files.")
    parser.add_argument("--count", type=int, default=100_000, help="files (100000)")
    parser.add_argument("--seed", type=int, default=0, help="of the random edits (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    figures = run(given.count, given.seed)
    wrong = figures["wrong"]
    assert isinstance(wrong, list)
    if given.json:
        text = json.dumps(figures)
    else:
        lines = [f"{name:<10}{value:>12}" for name, value in figures.items() if name != "wrong"]
        text = "\n".join([*lines, f"{'wrong':<10}{len(wrong):>12}", *wrong])
    sys.stdout.write(text + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
