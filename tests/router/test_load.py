"""``Router.load``: whatever is wrong makes an inactive router, never an exception."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.domain.fingerprint import Facts
from autotune.router import Router
from autotune.table.dump import dump_table, write_table
from tests.table import samples

DATA = dump_table(samples.sample())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "table.yaml"
    write_table(samples.sample(), path)
    return path


def answers(router: Router) -> list[str]:
    bound = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096)
    assert not any(bound.use_decode(2, 4, kv) for kv in (100, None)) or router.status.active
    return [bound.route(2, 4, 100), bound.route(2, 4), bound.route(1, 4, 100), bound.route(99, 4, 100)]


def assert_inactive(router: Router, reason: str = "") -> None:
    assert router.status.state == "inactive"
    assert not router.status.active
    assert reason in router.status.reason
    assert "\n" not in router.status.reason
    assert answers(router) == ["fallback"] * 4


def test_an_untouched_table_is_active(path: Path) -> None:
    router = Router.load(path, facts=samples.FACTS)
    assert router.status.state == "active"
    assert router.status.path == str(path)
    assert router.digest is not None
    assert DATA.decode().endswith(f'digest: "{router.digest}"\n')
    assert answers(router) == [samples.SPLIT, samples.SPLIT, samples.FALLBACK, samples.FALLBACK]
    assert Router.load(path, facts=samples.FACTS).digest == router.digest


def test_any_flipped_byte_is_inactive(path: Path) -> None:
    flipped = bytearray(DATA)
    with path.open("r+b") as file:
        for index, byte in enumerate(DATA):
            flipped[index] = byte ^ (1 << index % 8)
            file.seek(index)
            file.write(flipped[index : index + 1])
            file.flush()
            router = Router.load(path, facts=samples.FACTS)
            assert (router.status.state, router.digest) == ("inactive", None), index
            file.seek(index)
            file.write(DATA[index : index + 1])
            if index % 64 == 0:
                assert_inactive(router)
            flipped[index] = byte
        file.flush()
    assert Router.load(path, facts=samples.FACTS).status.active


def test_garbage_and_odd_files(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "link").symlink_to(fifo)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "half").write_bytes(DATA[: len(DATA) // 2])
    (tmp_path / "garbage").write_bytes(os.urandom(4096))
    for name in ("fifo", "link", "empty", "half", "garbage", "absent", "."):
        assert_inactive(Router.load(tmp_path / name, facts=samples.FACTS), str(tmp_path))
    odd: list[Any] = [None, 3, b"\xff", "", "\0", object(), ["x"], Evil(), -1]
    for value in odd:
        assert_inactive(Router.load(value, facts=samples.FACTS))


class Evil:
    """A path that fights back."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError

    def __fspath__(self) -> str:
        raise RuntimeError

    __str__ = __fspath__


def every_fact(facts: Facts) -> Iterator[tuple[str, Facts]]:
    for part in ("hardware", "software"):
        values: Mapping[str, Any] = getattr(facts, part)
        for key, value in values.items():
            others = {other: kept for other, kept in values.items() if other != key}
            changes: list[Any] = [f"{value}0", 0.5, None if value is not None else 0]
            if isinstance(value, int):
                changes += [str(value), value + 1, float(value)]
            for found in (others, *({**others, key: changed} for changed in changes)):
                yield key, with_part(facts, part, found)


def with_part(facts: Facts, part: str, found: dict[str, Any]) -> Facts:
    return replace(facts, hardware=found) if part == "hardware" else replace(facts, software=found)


@pytest.mark.parametrize("facts", [samples.FACTS, samples.CUDA_FACTS], ids=["cpu", "cuda"])
def test_any_changed_or_missing_fact_is_inactive(tmp_path: Path, facts: Facts) -> None:
    path = tmp_path / "table.yaml"
    digest = write_table(samples.table_of(samples.sample_cells(), facts=facts), path)
    assert Router.load(path, facts=facts).status.active
    seen = set()
    for key, changed in every_fact(facts):
        seen.add(key)
        router = Router.load(path, facts=changed)
        assert_inactive(router, key)
        assert router.digest == digest  # the table is sound, so ranks can still compare it
    assert seen == {*facts.hardware, *facts.software}
    assert_inactive(Router.load(path, facts=replace(facts, device="tpu")), "device")
    assert Router.load(path, facts=replace(facts, informative={})).status.active


def test_facts_as_dictionary_file_or_nothing(path: Path, tmp_path: Path) -> None:
    given = samples.FACTS.to_dict()
    assert Router.load(path, facts=given).status.active
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(given))
    assert Router.load(path, facts=file).status.active
    assert Router.load(str(path), facts=str(file)).status.active
    assert_inactive(Router.load(path), "no facts of this machine were given")


def test_facts_that_are_none(path: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "facts.fifo"
    os.mkfifo(fifo)
    for name, text in (("list", "[]"), ("broken", "{"), ("deep", "[" * 100_000), ("device", '{"device": 1}')):
        (tmp_path / name).write_text(text)
        assert_inactive(Router.load(path, facts=tmp_path / name), f"facts file '{tmp_path / name}'")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    assert_inactive(Router.load(path, facts=tmp_path / "bytes"), "facts file")
    assert_inactive(Router.load(path, facts=fifo), "not a regular file")
    assert_inactive(Router.load(path, facts=tmp_path / "absent"), "cannot be read")
    odd: list[Any] = [
        3,
        [],
        {},
        {"device": "cpu"},
        {"device": "cpu", "hardware": 3},
        {"device": []},
        object(),
    ]
    odd.append(Facts("cpu", None, None))  # type: ignore[arg-type]
    for facts in odd:
        assert_inactive(Router.load(path, facts=facts))


def test_the_callers_own_word_for_the_fallback(path: Path, tmp_path: Path) -> None:
    router = Router.load(tmp_path / "absent", facts=samples.FACTS, fallback="mine")
    assert router.bind(samples.SHAPE, samples.DTYPES, max_context=4096).route(2, 4) == "mine"
    active = Router.load(path, facts=samples.FACTS, fallback="mine")
    bind = active.bind(samples.OTHER_SHAPE, samples.DTYPES, max_context=4096)
    assert bind.route(2, 4) == "mine"
    assert active.bind(samples.SHAPE, samples.DTYPES, max_context=4096).route(1, 4, 5) == samples.FALLBACK
    odd: Any = 7
    assert Router.load(path, fallback=odd).bind(samples.SHAPE, samples.DTYPES, max_context=1).route(1, 1) == (
        "fallback"
    )


def test_one_log_line_per_load_and_per_kind_of_miss(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="autotune.router")
    router = Router.load(path, facts=samples.FACTS)
    assert [(r.levelname, r.name) for r in caplog.records] == [("INFO", "autotune.router")]
    assert router.digest is not None
    assert router.digest in caplog.text
    caplog.clear()
    odd: Any = "2"
    bound = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096)
    bound.route(2, 4, 100)
    bound.route(1, 4, 100)
    assert not caplog.records  # a decided cell is no miss
    for _ in range(50):
        for call in ((99, 4, 100), (2, 99, 100), (2, 4, 5000), (odd, 4, 100)):
            router.bind(samples.SHAPE, samples.DTYPES, max_context=4096).route(*call)
        router.bind(samples.OTHER_SHAPE, samples.DTYPES, max_context=4096).route(2, 4)
        router.bind(samples.SHAPE, samples.DTYPES, max_context=8192).route(2, 4)
    assert len(caplog.records) == 6
    caplog.clear()
    inactive = Router.load(path)
    inactive.bind(samples.SHAPE, samples.DTYPES, max_context=4096).route(2, 4)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "\n" not in caplog.records[0].getMessage()


def test_a_log_handler_that_raises_does_no_harm(path: Path) -> None:
    def boom(record: logging.LogRecord) -> bool:
        raise RuntimeError(record)

    logger = logging.getLogger("autotune.router")
    logger.addFilter(boom)
    try:
        router = Router.load(path, facts=samples.FACTS)
        assert router.bind(samples.SHAPE, samples.DTYPES, max_context=4096).route(99, 4) == samples.FALLBACK
    finally:
        logger.removeFilter(boom)


def test_a_quarantine_binds_even_where_letters_were_left(tmp_path: Path) -> None:
    item = '{route: "torch-splitkv", reason: "crash", at: "2026-12-01T00:00:00Z", '
    item += "shape: null, dtypes: null, q_len: null, batch_size: 2}"
    path = tmp_path / "table.yaml"
    path.write_bytes(samples.edited(DATA, "quarantine: []", f"quarantine: [{item}]"))
    router = Router.load(path, facts=samples.FACTS)
    assert router.status.active
    bound = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096)
    assert [bound.route(batch, 4, 2000) for batch in (1, 2, 3, 4)] == [
        samples.SPLIT,
        samples.FALLBACK,
        samples.FALLBACK,
        samples.SPLIT,
    ]
    assert bound.explain(2, 4, 2000).why == "quarantined"
    assert bound.route(2, 4) == samples.FALLBACK
