"""What ``load_table`` refuses. Every edit is re-signed unless the digest itself is the subject."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.table.dump import dump_table
from autotune.table.errors import TableError
from autotune.table.load import load_table
from autotune.table.model import Eager, Entry, Grid, Proof, RoutingTable, Row, Speedup
from autotune.table.source import MAX_BYTES, sign
from autotune.table.validate import validate
from tests.table import samples

TABLE = samples.sample()
DATA = dump_table(TABLE)


def refused(data: bytes | Path) -> str:
    with pytest.raises(TableError) as caught:
        load_table(data)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


def test_every_flipped_byte() -> None:
    flipped = bytearray(DATA)
    for index in range(len(flipped)):
        for bit in (1, 0x20):
            flipped[index] ^= bit
            with pytest.raises(TableError):
                load_table(bytes(flipped))
            flipped[index] ^= bit
    assert load_table(bytes(flipped)) == TABLE


def test_every_truncation_and_appended_bytes() -> None:
    for length in range(0, len(DATA), 7):
        refused(DATA[:length])
    for tail in (b"\n", b" ", b"\0", b"x: 1\n"):
        assert "last line" in refused(DATA + tail)
    assert "last line" in refused(DATA.replace(b"\n", b"\r\n"))


def test_not_a_regular_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    link = tmp_path / "link"
    link.symlink_to(fifo)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nothing")
    start = time.monotonic()
    for path in (fifo, link, tmp_path, Path("/dev/zero"), Path("/dev/null")):
        assert "not a regular file" in refused(path)
    for path in (dangling, tmp_path / "absent", tmp_path / ("n" * 400)):
        assert "cannot be read" in refused(path)
    assert time.monotonic() - start < 5.0


def test_a_link_to_a_table_is_fine(tmp_path: Path) -> None:
    """Kubernetes mounts configuration as symbolic links."""
    (tmp_path / "table").write_bytes(DATA)
    (tmp_path / "link").symlink_to(tmp_path / "table")
    assert load_table(tmp_path / "link") == TABLE
    assert load_table(str(tmp_path / "link")) == TABLE


def test_too_large_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: one TiB
    assert str(MAX_BYTES) in refused(path)
    assert str(MAX_BYTES) in refused(bytes(MAX_BYTES + 1))


def test_the_message_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_bytes(DATA[:-1])
    assert refused(path).startswith(f"{path}: last line: ")


BODIES = {
    "empty": (b"", "empty"),
    "newline": (b"\n", "empty"),
    "comment": (b"# nothing\n", "empty"),
    "utf16": ("schema: x\n".encode("utf-16-le"), "last line"),
    "latin1": ('a: "\xe9"\n'.encode("latin-1"), "not UTF-8"),
    "nul": (b'a: "\0"\n', "export"),
    "scalar": (b'"a"\n', "must be a mapping"),
    "list": (b'["a"]\n', "must be a mapping"),
    "plain string": (b"a: word\n", "quote strings"),
    "timestamp": (b"a: 2026-01-01\n", "quote strings"),
    "octal": (b"a: 010\n", "quote strings"),
    "norway": (b"a: no\n", "quote strings"),
    "infinity": (b"a: .inf\n", "quote strings"),
    "overflow": (b"a: 1.0e+999\n", "quote strings"),
    "huge integer": (b"a: " + b"9" * 5000 + b"\n", "quote strings"),
    "block scalar": (b"a: |\n  b\n", "block scalar"),
    "tab": (b"a:\t1\n", "tab"),
    "anchor": (b'a: &x "b"\n', "anchor"),
    "alias": (b"a: *x\n", "anchor or alias"),
    "anchored key": (b'&x a: "b"\n', "key"),
    "merge": (b"<<: {a: 1}\n", "must be quoted"),
    "tag": (b'a: !!python/object/apply:os.system ["true"]\n', "tag"),
    "string tag": (b'a: !!str "b"\n', "tag"),
    "tagged key": (b'!!str a: "b"\n', "key"),
    "list as key": (b"? [1]\n: 2\n", "key"),
    "duplicate key": (b"a: 1\na: 2\n", "twice"),
    "duplicate quoted key": (b'a: 1\n"a": 2\n', "twice"),
    "two documents": (b"a: 1\n---\na: 2\n", "second document"),
    "unbalanced": (b"a: [1\n", "export"),
    "directive": (b"%YAML 9.9\n---\na: 1\n", "export"),
    "no schema": (b"a: 1\n", "schema"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_correctly_signed_body_that_is_no_table(name: str) -> None:
    body, message = BODIES[name]
    assert message in refused(sign(body))


def test_deep_nesting_and_alias_bombs_end_quickly() -> None:
    start = time.monotonic()
    # libyaml has a limit of its own, which may come first.
    assert "nest" in refused(sign(b"a: " + b"[" * 1_000_000 + b"\n"))
    assert "deeper than" in refused(sign(b"".join(b" " * depth + b"a:\n" for depth in range(500))))
    bomb = "".join(f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9) if n else '1'}]\n" for n in range(30))
    assert "anchor" in refused(sign(bomb.encode()))
    assert time.monotonic() - start < 10.0


EDITS = {
    "newer": ('routing-table/1"', 'routing-table/2"', "newer than this autotune reads; upgrade"),
    "older": ('routing-table/1"', 'routing-table/0"', "no longer read"),
    "not a version": ('routing-table/1"', 'routing-table/1b"', "schema: must be"),
    "schema type": ('"autotune/routing-table/1"', "1", "schema: must be"),
    "unknown top key": ("unsafe:", "extra: 1\nunsafe:", "unknown key 'extra'"),
    "digest twice": ("unsafe:", 'digest: "x"\nunsafe:', "unknown key 'digest'"),
    "missing key": ("quarantine: []\n", "", "key 'quarantine' is missing"),
    "unknown entry key": ("  fallback:", "  only_on_mondays: true\n  fallback:", "unknown key"),
    "missing fact": (", threads: 1", "", "hardware: key 'threads' is missing"),
    "extra fact": (", threads: 1", ", threads: 1, moon: 1", "unknown key 'moon'"),
    "unknown device": ('device: "cpu"', 'device: "tpu"', "hardware.device"),
    "fact is a list": ("threads: 1", "threads: [1]", "hardware.threads: must be one value"),
    "bool as int": ("q_len: 4", "q_len: true", "q_len: must be an integer, not True"),
    "float as int": ("max_context: 4096", "max_context: 4096.0", "must be an integer"),
    "string as int": ("q_len: 4", 'q_len: "4"', "must be an integer"),
    "int as bool": ("sinks: false", "sinks: 0", "shape.sinks: must be bool"),
    "bool as number": ("tau: 0.01", "tau: true", "policy.tau: must be a number"),
    "shape default": (", mask: " + '"causal"', "", "shape: key 'mask' is missing"),
    "shape nonsense": ("num_qo_heads: 8", "num_qo_heads: 0", "num_qo_heads must be a positive"),
    "shape sentinel": ("head_dim_vo: 128", "head_dim_vo: 0", "head_dim_vo: must be positive"),
    "unknown layout": ('"fused-nhd"', '"sideways"', "sideways"),
    "unknown dtype": ('kv: "bf16"', 'kv: "int3"', "kv dtype 'int3' is unknown"),
    "unknown letter": ('".sss"', '".szs"', "letter 'z' is not in the legend"),
    "short row": ('".sss"', '".ss"', "3 letters for 4 batch sizes"),
    "long row": ('".sss"', '".ssss"', "5 letters for 4 batch sizes"),
    "row end spelled oddly": ('"1024": ".sss"', '"01024": ".sss"', "not a KV length"),
    "row end not ASCII": ('"1024": ".sss"', '"\u0661": ".sss"', "not a KV length"),
    "sizes descend": ("[1, 2, 4, 8]", "[2, 1, 4, 8]", "batch_size"),
    "size twice": ("[1, 2, 4, 8]", "[1, 2, 2, 8]", "batch_size"),
    "size zero": ("[1, 2, 4, 8]", "[0, 2, 4, 8]", "batch_size"),
    "any names too much": ('"any": ".sss"', '"any": "ssss"', "is 'ssss', but the rows allow '.sss'"),
    "any names too little": ('"any": ".sss"', '"any": "...."', "but the rows allow"),
    "reserved word": ('"s": "torch-splitkv"', '"s": "fallback"', "not a route's name"),
    "reserved word, longer": ('"s": "torch-splitkv"', '"s": "fallback: unproven"', "not a route's name"),
    "letter meaning changed": ('".": "fallback"', '".": "torch-splitkv"', "letter '.' must mean"),
    "letter of two characters": ('"s": "torch', '"ss": "torch', "cannot be a letter"),
    "two letters, one route": ('"s": "torch-splitkv"', '"s": "torch-splitkv"\n  "t": "torch-splitkv"', "two"),
    "no family": (', "torch-splitkv": "decode"}', "}", "families: route 'torch-splitkv' is missing"),
    "unknown family": ('"torch-splitkv": "decode"}', '"torch-splitkv": "fast"}', "families.torch-splitkv"),
    "decode fallback": ('"torch-sdpa": "context"', '"torch-sdpa": "decode"', "not of the context family"),
    "foreign family": ("families: {", 'families: {"zz": "decode", ', "'zz' is not named"),
    "interval not captured": ("[[2, 4], [4, 8]]", "[[2, 3], [4, 8]]", "[2, 3] must ascend between"),
    "interval descends": ("[[2, 4], [4, 8]]", "[[4, 2], [4, 8]]", "[4, 2] must ascend between"),
    "intervals overlap": ("[[2, 4], [4, 8]]", "[[1, 4], [2, 8]]", "overlap or descend"),
    "interval of three": ("[[2, 4], [4, 8]]", "[[2, 3, 4], [4, 8]]", "must be [low, high]"),
    "proof of another": ('    "torch-splitkv": {checks', '    "acme": {checks', "'acme' is proven but named"),
    "no checks": ("checks: 9", "checks: 0", "checks: must be positive"),
    "no launches": ("launches: 600", "launches: -1", "launches: must be positive"),
    "negative error": ("worst_error: 0.004", "worst_error: -0.004", "worst_error"),
    "requires a sentence": ("requires: []", 'requires: ["Be good"]', "requires"),
    "no bound": ("[null, 1.1234,", "[null, null,", "letter 's' needs a proven bound above 1.0"),
    "bound below one": ("[null, 1.1234,", "[null, 0.97,", "letter 's' needs a proven bound above 1.0"),
    "bound without a route": ("[null, 1.1234,", "[1.3, 1.1234,", "where no route is named"),
    "ratio missing": ("[null, 1.1234, 1.1234, 1.1234]", "[null, 1.1234, 1.1234]", "one value per row"),
    "failure kind": ('kind: "illegal_access"', 'kind: "bad_luck"', "'bad_luck' is not a failure kind"),
    "time": ("2026-11-29T12:00:00Z", "yesterday", "generated.at"),
    "margin": ("margin: 0.03", "margin: 2.0", "policy.margin"),
    "margin under three taus": (
        "margin: 0.03",
        "margin: 0.02",
        "policy.margin: 0.02 is under 0.03, 3 x tau 0.01: no export writes that; export the table again",
    ),
    "tau raised over the margin": ("tau: 0.01", "tau: 0.0101", "policy.margin: 0.03 is under 0.0303"),
    "bound under the margin": ("[null, 1.1234,", "[null, 1.0298,", "1.03, 1 + policy.margin, not 1.0298"),
    "margin over the bounds": ("margin: 0.03", "margin: 0.2", "1.2, 1 + policy.margin, not 1.1234"),
    "ratio to no stock": ('stock: "torch-sdpa"', "stock: null", "policy.stock is null"),
    "padding past the context": ("pad_value: 1}", "pad_value: 4097}", "4096 is under policy.pad_value 4097"),
    "negative padding": ("pad_value: 1}", "pad_value: -1}", "policy.pad_value"),
    "a truth value as padding": ("pad_value: 1}", "pad_value: true}", "policy.pad_value"),
    "no padding": (", pad_value: 1}", "}", "key 'pad_value' is missing"),
    "false claims": ("any_false_claim: 0.05", "any_false_claim: 0.0", "policy.any_false_claim"),
    "stock": ('stock: "torch-sdpa"', 'stock: "any"', "policy.stock"),
    "max context below rows": ("max_context: 4096", "max_context: 2048", "rows must ascend"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_and_signed_table(name: str) -> None:
    old, new, message = EDITS[name]
    assert message in refused(samples.edited(DATA, old, new))


def test_margins_and_bounds_that_exports_do_write() -> None:
    """A bound is rounded down, so it may stand at the margin; in older tables a tau of 0.0 is none."""
    kept = samples.edited(DATA, "[null, 1.1234,", "[null, 1.03,")
    assert load_table(kept).entries[0].speedup.low[0][1] == 1.03
    for tau, margin in (("0.0", "0.001"), ("null", "0.001"), ("0.01", "0.03"), ("0.0137", "0.0411")):
        edited = samples.edited(DATA, "margin: 0.03, tau: 0.01", f"margin: {margin}, tau: {tau}")
        assert load_table(edited).policy.margin == float(margin)


def test_rows_must_ascend_inside_the_entry() -> None:
    for end in ("3", "4096", "4097", "9999"):
        other = "2048" if end == "4096" else "4096"
        data = samples.edited(DATA, '"4096"', f'"{other}"', -1)
        data = samples.edited(data, '"1024"', f'"{end}"', -1)
        assert "rows must ascend" in refused(data)
    assert "key '1024' is missing" in refused(samples.edited(DATA, '"1024": [', '"1023": ['))


def test_a_letter_may_not_name_the_fallback() -> None:
    cells = [samples.decided(1, (4, 4096), samples.FASTER)]
    cells += [samples.decided(9, (4, 4096), samples.SLOWER, fallback="torch-eager")]
    data = dump_table(samples.table_of(cells))
    load_table(data)
    data = samples.edited(data, '"s": "torch-splitkv"', '"s": "torch-eager"')
    data = samples.edited(data, ', "torch-splitkv": "decode"', "")
    data = samples.edited(data, '    "torch-splitkv": {', '    "torch-eager": {')
    load_table(data)  # in another entry than its own, it is a route like any other
    data = samples.edited(data, 'fallback: "torch-sdpa"', 'fallback: "torch-eager"')
    assert "letter 's' names the fallback 'torch-eager'; write '.'" in refused(data)


def test_a_route_without_a_proof() -> None:
    with pytest.raises(TableError, match="route 'torch-splitkv' has no proof"):
        validate(with_entry(replace(TABLE.entries[0], proof=())))


def test_rows_that_stop_short_cannot_name_any() -> None:
    """Lengths between the last row and max_context are unproven, so no length-free answer exists."""
    data = samples.edited(DATA, "max_context: 4096", "max_context: 8192")
    assert "but the rows allow '????'" in refused(data)


def with_entry(entry: Entry) -> RoutingTable:
    return replace(TABLE, entries=(entry,))


def test_an_interval_may_not_say_more_than_its_captured_sizes() -> None:
    entry = TABLE.entries[0]
    assert entry.eager is not None
    grid = Grid.of((Row(1024, "s"), Row(4096, "s")), 4096)
    wide = Eager(((1, 4),), grid, Speedup(((1.1,), (1.1,)), ((None,), (None,))))
    with pytest.raises(TableError, match=r"\[1, 4\] names 'torch-splitkv', but its captured sizes do not"):
        validate(with_entry(replace(entry, eager=wide)))


def test_one_batch_size_in_two_entries() -> None:
    entry = TABLE.entries[0]
    with pytest.raises(TableError, match=r"entries\[1\]: batch sizes 1..1 are also in entries\[0\]"):
        validate(replace(TABLE, entries=(entry, entry)))
    inside = samples.table_of([samples.decided(3, samples.LOW, samples.SLOWER)]).entries[0]
    with pytest.raises(TableError, match="are also in"):
        validate(replace(TABLE, entries=(entry, inside)))
    beside = samples.table_of([samples.decided(9, samples.LOW, samples.SLOWER)]).entries[0]
    validate(replace(TABLE, entries=(entry, beside)))


def test_a_proof_for_nothing() -> None:
    entry = TABLE.entries[0]
    extra = Proof("acme-decode", 9, 100, 0.1, 0.1)
    with pytest.raises(TableError, match="named nowhere"):
        validate(with_entry(replace(entry, proof=(*entry.proof, extra))))
    with pytest.raises(TableError, match="appears twice"):
        validate(with_entry(replace(entry, proof=entry.proof * 2)))


def test_a_large_table_loads_in_reasonable_time() -> None:
    cells = [
        samples.decided(batch, (low + 1 if low else 4, low + 16), samples.FASTER)
        for batch in range(1, 33)
        for low in range(0, 1600, 16)
    ]
    data = dump_table(samples.table_of(cells))
    start = time.perf_counter()
    table = load_table(data)
    took = time.perf_counter() - start
    print(f"{len(cells)} cells, {len(data)} bytes: loaded in {took * 1e3:.0f} ms")  # noqa: T201
    assert len(table.entries[0].routes.rows) == 100
    assert took < 5.0
