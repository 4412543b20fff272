"""A running router takes up a new table whole, keeps the old one where the new is bad, and says which."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.router import Bound, Router, file_mark
from autotune.table.dump import dump_table, write_table
from autotune.table.model import Quarantine
from autotune.table.withdraw import withdraw
from tests.table import samples
from tests.table.samples import DTYPES, FALLBACK, FASTER, SHAPE, SLOWER, SPLIT, decided

ALL = samples.sample()
ITEM = Quarantine(SPLIT, "crashed (signed off by x)", "2026-12-01T00:00:00Z", batch_size=2)
FEWER = withdraw(ALL, [ITEM])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "table.yaml"
    write_table(ALL, path)
    return path


def load(path: Path) -> tuple[Router, Bound]:
    router = Router.load(path, facts=samples.FACTS)
    return router, router.bind(SHAPE, DTYPES, max_context=4096)


def answers(bound: Bound) -> list[str]:
    return [bound.route(2, 4, 100), bound.route(2, 4), bound.route(8, 4, 2000), bound.route(99, 4)]


def poll(router: Router) -> bool:
    return router.poll(min_interval_s=0.0)


def stale(router: Router) -> list[tuple[int, int | None]]:
    return [(each.batch_size, each.max_kv_len) for each in router.status.recapture]


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_bindings_follow_a_new_table(path: Path) -> None:
    router, bound = load(path)
    route, use_decode, digest = bound.route, bound.use_decode, router.digest
    assert not poll(router)
    assert answers(bound) == [SPLIT, SPLIT, SPLIT, FALLBACK]
    write_table(FEWER, path)
    assert route(2, 4, 100) == SPLIT  # nothing happens by itself
    generation = router.generation
    assert poll(router)
    assert router.generation > generation
    assert answers(bound) == [FALLBACK, FALLBACK, SPLIT, FALLBACK]
    assert (route(2, 4, 100), use_decode(2, 4)) == (FALLBACK, False)  # methods taken before, too
    assert bound.explain(2, 4, 100).why == "quarantined"
    assert router.digest != digest
    assert router.status.digest == router.digest
    assert not poll(router)
    write_table(ALL, path)
    assert poll(router)
    assert answers(bound) == [SPLIT, SPLIT, SPLIT, FALLBACK]
    assert router.digest == digest


def test_a_look_at_the_file_at_most_once_in_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router, bound = load(path)
    write_table(FEWER, path)
    looked: list[object] = []
    monkeypatch.setattr(os, "stat", lambda *args, **kwargs: looked.append(args))
    for _ in range(100):
        assert not router.poll(min_interval_s=3600.0)
        bound.route(2, 4, 100)
    assert looked == []
    monkeypatch.undo()
    assert poll(router)


@pytest.mark.parametrize(
    "kind", ["truncated", "flipped", "empty", "gone", "fifo", "folder", "elsewhere", "newer"]
)
def test_a_bad_new_file_keeps_the_old_table(path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    router, bound = load(path)
    digest, data = router.digest, path.read_bytes()
    fresh = path.with_name("fresh")
    if kind == "truncated":
        fresh.write_bytes(data[:-100])
    elif kind == "flipped":
        fresh.write_bytes(data.replace(b"1024", b"1025", 1))
    elif kind == "empty":
        fresh.write_bytes(b"")
    elif kind == "elsewhere":
        write_table(samples.table_of([], facts=samples.CUDA_FACTS), fresh)
    elif kind == "newer":
        fresh.write_bytes(samples.edited(data, "routing-table/1", "routing-table/2"))
    elif kind == "fifo":
        os.mkfifo(fresh)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "gone":
        fresh.replace(path)
    caplog.set_level(logging.INFO, logger="autotune.router")
    for _ in range(3):
        assert not poll(router)
    assert answers(bound) == [SPLIT, SPLIT, SPLIT, FALLBACK]
    status = router.status
    assert (status.state, status.digest) == ("active", digest)
    assert status.refused
    assert status.refused in status.reason
    assert "\n" not in status.reason
    kept = [record for record in caplog.records if "kept the table" in record.getMessage()]
    assert [record.levelname for record in kept] == ["WARNING"]  # once, however often it looks
    if kind == "folder":
        path.rmdir()
    path.unlink(missing_ok=True)
    write_table(ALL, path)
    assert not poll(router)  # the very table that is in use
    assert router.status.refused == ""
    write_table(FEWER, path)
    assert poll(router)
    assert router.status.refused == ""


def test_a_router_that_began_without_a_table(tmp_path: Path) -> None:
    path = tmp_path / "later.yaml"
    router, bound = load(path)
    assert (router.status.state, answers(bound)) == ("inactive", ["fallback"] * 4)
    path.write_bytes(b"half a table")
    assert not poll(router)
    assert "last line" in router.status.reason
    write_table(ALL, path)
    assert poll(router)
    assert (router.status.state, answers(bound)) == ("active", [SPLIT, SPLIT, SPLIT, FALLBACK])


def test_a_second_change_that_leaves_no_trace_in_the_times(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file written twice within one tick of the file system's clock: equal marks, other bytes."""
    now = time.time_ns()
    monkeypatch.setattr(file_mark, "_stat", lambda path: (1, 1, 1, now, now))
    router, bound = load(path)
    write_table(FEWER, path)
    assert poll(router)
    assert bound.route(2, 4) == FALLBACK
    monkeypatch.setattr(file_mark, "time_ns", lambda: now + 3_600_000_000_000)
    assert not poll(router)  # the last look at a file that has settled meanwhile
    write_table(ALL, path)
    assert not poll(router)  # from then on equal marks are believed
    monkeypatch.undo()
    assert poll(router)


def test_a_relative_path_is_that_of_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    router, bound = load(Path(path.name))
    monkeypatch.chdir("/")
    write_table(FEWER, path)
    assert poll(router)
    assert bound.route(2, 4) == FALLBACK


def test_bad_arguments_stay_bad(path: Path) -> None:
    router, _ = load(path)
    bound = router.bind(SHAPE, DTYPES, max_context=-1)
    unknown = router.bind(samples.OTHER_SHAPE, DTYPES, max_context=4096)
    write_table(samples.table_of([decided(2, (4, 4096), FASTER, shape=samples.OTHER_SHAPE)]), path)
    assert poll(router)
    assert bound.explain(2, 4, 100).why == "bad_input"
    assert unknown.route(2, 4, 100) == SPLIT  # a shape that only the new table has


def test_captured_calls_that_the_new_table_answers_otherwise(path: Path) -> None:
    router, bound = load(path)
    assert [bound.capture(size, 4) for size in (1, 2, 4)] == [FALLBACK, SPLIT, SPLIT]
    other = router.bind(SHAPE, DTYPES, max_context=2048)
    assert other.capture(2, 4, 100) == SPLIT
    gone = weakref.ref(router.bind(SHAPE, DTYPES, max_context=1024))
    gc.collect()
    assert gone() is None  # a binding that captured nothing is not kept
    del other  # one that did is: the graph still holds its kernel
    gc.collect()
    assert stale(router) == []
    assert "recapture" not in router.status.reason
    write_table(FEWER, path)
    assert poll(router)
    status = router.status
    assert status.active
    assert stale(router) == [(2, None), (2, 100)]
    first = status.recapture[0]
    assert (first.shape, first.dtypes, first.q_len) == (SHAPE, DTYPES, 4)
    assert (first.captured, first.now, first.why) == (SPLIT, FALLBACK, "quarantined")
    assert (
        f"recapture needed: batch 2 q_len 4: {SPLIT} -> {FALLBACK} (quarantined) (and 1 more)"
        in status.reason
    )
    assert bound.capture(2, 4) == FALLBACK  # captured again
    assert stale(router) == [(2, 100)]
    bound.release()
    write_table(ALL, path)
    assert poll(router)
    assert stale(router) == []
    assert bound.capture(True, 4) == FALLBACK
    assert stale(router) == []


def test_a_suspended_router_answers_the_fallback_also_after_a_reload(path: Path) -> None:
    router, bound = load(path)
    bound.capture(2, 4)
    router.suspend("the ranks differ")
    assert (router.status.state, router.status.reason.split(";")[0]) == ("inactive", "the ranks differ")
    assert answers(bound) == ["fallback"] * 4
    assert answers(router.bind(SHAPE, DTYPES, max_context=4096)) == ["fallback"] * 4
    assert [each.now for each in router.status.recapture] == ["fallback"]
    write_table(FEWER, path)
    assert poll(router)
    assert answers(bound) == ["fallback"] * 4
    router.resume()
    assert router.status.active
    assert answers(bound) == [FALLBACK, FALLBACK, SPLIT, FALLBACK]


def test_watch(path: Path) -> None:
    router, bound = load(path)
    watch = router.watch(interval_s=0.01)
    assert router.watch() is watch
    write_table(FEWER, path)
    until(lambda: bound.route(2, 4) == FALLBACK)
    watch.stop()
    assert not watch.alive
    write_table(ALL, path)
    again = router.watch(interval_s=0.01)
    assert again is not watch
    until(lambda: bound.route(2, 4) == SPLIT)
    again.stop()


def test_a_router_that_nobody_has_is_not_watched(path: Path) -> None:
    watch = load(path)[0].watch(interval_s=0.01)
    gc.collect()
    until(lambda: not watch.alive)


def test_look_ups_during_reloads_see_one_table_or_the_other(path: Path) -> None:
    """Rows that end elsewhere, letters that say the opposite: rows of one with letters of the other would
    answer what neither says, at 1,500 (both: fallback) and at 3,000 (both: the route)."""
    one = samples.table_of(
        [decided(2, (4, 1024), FASTER), decided(2, (1025, 2048), SLOWER), decided(2, (2049, 4096), FASTER)]
    )
    two = samples.table_of(
        [decided(2, (4, 1100), SLOWER), decided(2, (1101, 1600), SLOWER), decided(2, (1601, 4096), FASTER)]
    )
    write_table(one, path)
    router, bound = load(path)
    images = [dump_table(two), dump_table(one)]
    done = threading.Event()
    wrong: list[tuple[int, str]] = []
    seen: set[str] = set()

    def look() -> None:
        while not done.is_set():
            for kv, expected in ((1500, FALLBACK), (3000, SPLIT), (4097, FALLBACK)):
                if (answer := bound.route(2, 4, kv)) != expected:
                    wrong.append((kv, answer))
            seen.add(bound.route(2, 4, 500))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    fresh = path.with_name("fresh")
    taken_up = 0
    for step in range(60):
        fresh.write_bytes(images[step % 2])
        fresh.replace(path)
        taken_up += poll(router)
    until(lambda: len(seen) == 2)
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert taken_up == 60
    assert seen == {SPLIT, FALLBACK}


def test_a_log_handler_that_raises_or_asks_the_router_does_no_harm(path: Path) -> None:
    router, bound = load(path)

    def boom(record: logging.LogRecord) -> bool:
        router.bind(SHAPE, DTYPES, max_context=4096)
        router.poll(min_interval_s=0.0)
        raise RuntimeError(record)

    logger = logging.getLogger("autotune.router")
    logger.addFilter(boom)
    try:
        path.write_bytes(b"")
        assert not poll(router)
        write_table(FEWER, path)
        poll(router)
        assert bound.route(2, 4) == FALLBACK
        router.suspend("x")
        router.resume()
    finally:
        logger.removeFilter(boom)
    assert router.status.active


def test_a_relative_facts_file_is_found_from_another_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "facts.json").write_text(json.dumps(samples.FACTS.to_dict()))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    router = Router.load("table.yaml", facts="facts.json")
    assert router.status.active
    monkeypatch.chdir("other")
    write_table(FEWER, path)
    assert poll(router), router.status.refused
