"""``autotune ab`` against real servers: what is faster, what is not, and what is no comparison."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.cli.main import main
from autotune.engines.ab.compare import Rounds, claims_of
from autotune.engines.ab.turn import Case, Turn, prompts
from tests.engines.ab.fake_server import FakeServer, serving


@pytest.fixture
def pair() -> Iterator[tuple[FakeServer, FakeServer]]:
    with serving() as a, serving() as b:
        yield a, b


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["ab", *arguments])
    return int(ended.value.code or 0)


SMALL = ("--concurrency", "1", "--max-tokens", "4", "--prompt-words", "3")


def test_a_slower_server_is_told_from_a_faster_one(
    pair: tuple[FakeServer, FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    a.token_s, b.token_s = 0.02, 0.001  # a busy machine does not turn that round
    assert run("--a", a.url, "--b", b.url, *SMALL, "--rounds", "10", "--json") == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["tokens_per_s_ratio"]["better"] == "b"
    assert case["tokens_per_s_ratio"]["low"] > 1
    assert case["rounds"] == 10 and case["same_answers"] == case["answers"] == 10
    assert case["a"]["accept"] == 3.25
    for server in pair:
        # model, then a warm-up and ten rounds: flush, metrics, answer, metrics
        assert server.paths()[1:5] == ["/flush_cache", "/metrics", "/v1/completions", "/metrics"]
        assert server.paths().count("/flush_cache") == 11
    asked = [[body["prompt"] for path, body in server.seen if path == "/v1/completions"] for server in pair]
    assert asked[0] == asked[1] and len(set(asked[0])) == 11


def test_concurrency_and_text(
    pair: tuple[FakeServer, FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    a.token_s = b.token_s = 0.01
    b.metrics = ""
    assert run("--a", a.url, "--b", b.url, *SMALL, "--concurrency", "1,3", "--rounds", "1", "--no-flush") == 0
    said = capsys.readouterr().out
    assert a.most_at_once == b.most_at_once == 3
    assert "/flush_cache" not in a.paths()
    assert "concurrency 3, 3 words in, 4 tokens out: 1 rounds, 3 of 3 answers alike" in said
    assert "[?, ?]: undecided" in said and "accept len: A 3.25, B not offered" in said


@pytest.mark.parametrize("fault", ["500", "short", "cut", "stall"])
def test_a_server_that_fails_ends_it_in_one_line(
    pair: tuple[FakeServer, FakeServer], capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    a, b = pair
    b.fault = fault
    assert run("--a", a.url, "--b", b.url, *SMALL, "--timeout", "0.5") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith(f"autotune: {b.url}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--a", "http://x", "--b", "http://x"),
        ("--a", "http://x", "--b", "http://y", "--concurrency", "0"),
        ("--a", "http://x", "--b", "http://y", "--concurrency", "1,1"),
        ("--a", "http://x", "--b", "http://y", "--concurrency", "many"),
        ("--a", "http://x", "--b", "ftp://y"),
        ("--a", "http://x", "--b", "http://y", "--key-env", "NOT_SET_ANYWHERE"),
        ("--a", "http://x", "--b", "http://y", "--key-env", ""),
        ("--a", "http://x", "--b", "http://y", "--timeout", "inf"),
        ("--a", "http://x", "--b", "http://y", "--timeout", "1e300"),
        ("--a", "http://x", "--b", "http://y", "--timeout", "nan"),
        ("--a", "http://x", "--b", "http://x", "--switch", " "),
        ("--a", "http://x", "--b", "http://x", "--switch", "'"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_one_server_that_is_switched(
    pair: tuple[FakeServer, FakeServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, _ = pair
    script, log = tmp_path / "switch.py", tmp_path / "log"
    script.write_text(f"import sys\nopen({str(log)!r}, 'a').write(sys.argv[1])\n")
    both = ("--a", server.url, "--b", server.url, *SMALL, "--rounds", "2")
    assert run(*both, "--switch", f"{sys.executable} {script}") == 0
    sides = log.read_text()
    assert set(sides) == {"a", "b"} and "aa" not in sides and "bb" not in sides  # only where it changes
    script.write_text("import sys\nsys.exit('the mode is locked')\n")
    assert run(*both, "--switch", f"{sys.executable} {script}") == 1
    assert "the mode is locked" in capsys.readouterr().err


def test_the_key_is_sent(pair: tuple[FakeServer, FakeServer], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair
    monkeypatch.setenv("A_KEY", "hush\n")  # as from a file
    assert run("--a", a.url, "--b", b.url, *SMALL, "--rounds", "1", "--key-env", "A_KEY") == 0
    assert next(body for path, body in a.seen if path == "/flush_cache")["Authorization"] == "Bearer hush"


@pytest.mark.parametrize("key", ["hu\nsh", "hu\x7fsh", "hu\u20acsh", "hu\udc80sh"])
def test_a_key_that_no_header_takes_is_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("A_KEY", key)
    assert run("--a", "http://x", "--b", "http://y", "--key-env", "A_KEY") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert "A_KEY" in captured.err and "hu" not in captured.err


def rounds_of(ratios: list[float]) -> Rounds:
    found = Rounds(Case(1, 1, 2))
    found.turns = [(Turn(100.0, 0.01, None, ("x",)), Turn(100.0 * r, 0.01 / r, None, ("y",))) for r in ratios]
    return found


def test_bounds_of_known_ratios() -> None:
    """Ten rounds of 1.10: E+ of 10 among 10 passes 4 / 0.05 = 80, as (2^11 - 1) / 11 = 186 does."""
    ratio = rounds_of([1.10] * 10).ratio("tokens_per_s", claims_of(1))
    assert ratio is not None and ratio.better == "b"
    assert ratio.low == pytest.approx(1.10) and ratio.high == pytest.approx(1.10)
    worse = rounds_of([0.9] * 10).ratio("per_token_s", claims_of(1))
    assert worse is not None and worse.better == "a"
    even = rounds_of([1.1, 0.9] * 8).ratio("tokens_per_s", claims_of(1))
    assert even is not None and even.better is None
    few = rounds_of([1.5] * 7).ratio("tokens_per_s", claims_of(1))
    assert few is not None and (few.low, few.high, few.rounds, few.better) == (None, None, 7, None)
    assert rounds_of([1.5]).same_answers == (0, 1)


def test_prompts_are_new_in_every_round() -> None:
    case = Case(2, 5, 4)
    assert prompts(case, "0.1") == prompts(case, "0.1")
    assert len({*prompts(case, "0.1"), *prompts(case, "0.2")}) == 4
