import logging
import signal
import sys
import time
import weakref

import pytest
from sqlalchemy import create_engine, event, text

from autotune.cli import signals
from autotune.cli.signals import Interrupted, interruptible


class Thing:
    """What a weak reference can be made to."""


def wait_for_it() -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(0.001)
    raise AssertionError("no interruption came")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_at_once_and_the_next_one_kills(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    hook = sys.unraisablehook
    with pytest.raises(Interrupted), interruptible():
        try:
            signal.raise_signal(number)
        finally:
            assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before
    assert sys.unraisablehook is hook


def test_a_connection_goes_back_to_its_pool_first(caplog: pytest.LogCaptureFixture) -> None:
    timer = signal.getitimer(signal.ITIMER_REAL)
    engine = create_engine("sqlite://")
    resets = []

    @event.listens_for(engine, "reset")
    def on_reset(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        resets.append("whole")

    with caplog.at_level(logging.ERROR), pytest.raises(Interrupted), interruptible():
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))
        wait_for_it()
    event.remove(engine, "reset", on_reset)
    assert resets == ["whole"]
    assert not caplog.records
    assert signal.getitimer(signal.ITIMER_REAL) == pytest.approx(timer, abs=60)  # somebody's, as it was
    engine.dispose()


def test_a_library_that_blocks_in_its_bookkeeping_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_PATIENCE", 3)
    engine = create_engine("sqlite://")

    @event.listens_for(engine, "connect")
    def on_connect(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        wait_for_it()

    with pytest.raises(Interrupted), interruptible():
        engine.connect()
    engine.dispose()


def test_an_interruption_that_a_callback_swallowed_comes_again(capsys: pytest.CaptureFixture[str]) -> None:
    def callback(_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0)

    with pytest.raises(Interrupted), interruptible():
        thing = Thing()
        reference = weakref.ref(thing, callback)
        del thing
        wait_for_it()
    assert reference() is None
    assert capsys.readouterr().err == ""


def test_a_finalizer_ends_first() -> None:
    ended = []

    def finalizer() -> None:
        signal.raise_signal(signal.SIGTERM)
        ended.append("whole")

    with pytest.raises(Interrupted), interruptible():
        thing = Thing()
        weakref.finalize(thing, finalizer)
        del thing
        wait_for_it()
    assert ended == ["whole"]


def test_other_unraisable_exceptions_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: seen.append(lost.exc_type))

    class Broken:
        def __del__(self) -> None:
            raise LookupError

    with interruptible():
        Broken()
    assert seen == [LookupError]


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
