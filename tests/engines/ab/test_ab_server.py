"""What a server may do wrong, and the one line that says so."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from autotune.engines.ab.errors import ServerError
from autotune.engines.ab.metrics import Counters, accept_length, read_counters
from autotune.engines.ab.server import Server
from tests.engines.ab.fake_server import FakeServer, serving


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving() as found:
        yield found


def client(fake: FakeServer, timeout_s: float = 30.0) -> tuple[Server, list[float]]:
    slept: list[float] = []
    return Server(fake.url, timeout_s=timeout_s, sleep=slept.append), slept


def test_a_right_answer(fake: FakeServer) -> None:
    server, _ = client(fake)
    fake.token_s = 0.002
    answer = server.generate("hello", 9, server.model())
    assert (answer.tokens, answer.chunks, answer.text) == (9, 5, "word " * 9)
    assert answer.per_token_s is not None and answer.per_token_s > 0.001
    _, asked = fake.seen[-1]
    assert asked["model"] == "a-model" and asked["ignore_eos"] and asked["temperature"] == 0
    assert asked["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", 'answered 500: {"error": "out of memory"}'),
        ("cut", "ended after 2 pieces of text without [DONE]"),
        ("no-done", "without [DONE]"),
        ("error-event", "illegal memory access"),
        ("short", "says that it made 7 tokens; 8 were asked for"),
        ("boast", "says that it made 80 tokens; 8 were asked for"),
        ("no-usage", "does not say how many tokens"),
        ("no-text", "sent no text"),
        ("more-pieces", "sent 24 pieces of text"),
        ("garbage", "no JSON"),
        ("endless", "bytes for 8 tokens"),
    ],
)
def test_failures_and_lies(fake: FakeServer, fault: str, said: str) -> None:
    fake.fault = fault
    server, _ = client(fake)
    with pytest.raises(ServerError) as caught:
        server.generate("hello", 8, "a-model")
    assert said in str(caught.value) and str(caught.value).startswith(fake.url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["stall", "stall-with-comments"])
def test_a_stall_is_noticed(fake: FakeServer, fault: str) -> None:
    fake.fault = fault
    server, _ = client(fake, 0.3)
    with pytest.raises(ServerError, match="it has stalled"):
        server.generate("hello", 8, "a-model")


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_flush_finds_the_engines_way_and_tries_three_times(fake: FakeServer, path: str) -> None:
    fake.flush_path = path
    fake.flush = [400, 400]
    server, slept = client(fake)
    server.flush()
    assert slept == [2.0, 2.0]
    assert fake.paths().count(path) == 3
    server.flush()
    assert fake.paths()[-1] == path and len(slept) == 2


def test_flush_raises_the_last_error(fake: FakeServer) -> None:
    fake.flush = [400, 503, 418, 200]
    server, slept = client(fake)
    with pytest.raises(ServerError, match=r"answered 418: requests are running \(1 left\) \(try 3\)"):
        server.flush()
    assert slept == [2.0, 2.0]


def test_flush_that_no_engine_offers(fake: FakeServer) -> None:
    fake.flush_path = "/other"
    server, slept = client(fake)
    with pytest.raises(ServerError, match="--no-flush"):
        server.flush()
    assert slept == []


@pytest.mark.parametrize(("fault", "said"), [("no-model", "lists no model"), ("no-json", "answered no JSON")])
def test_models(fake: FakeServer, fault: str, said: str) -> None:
    fake.fault = fault
    with pytest.raises(ServerError, match=said):
        client(fake)[0].model()


def test_nobody_is_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        server = Server(f"127.0.0.1:{taken.getsockname()[1]}", sleep=lambda s: None)
        with pytest.raises(ServerError, match="refused"):
            server.model()
        with pytest.raises(ServerError, match="is not ready after 0 s"):
            server.wait_until_ready(0.0)
        assert server.counters() == Counters()


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port"])
def test_no_url(url: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        Server(url)


def test_paths_in_front_of_v1(fake: FakeServer) -> None:
    assert Server(f"{fake.url}/v1").model() == "a-model"
    assert Server(f"{fake.url}/v1/").url == fake.url


VLLM = (
    'vllm:spec_decode_num_drafts_total{engine="0"} %s\n'
    'vllm:spec_decode_num_accepted_tokens_total{engine="0"} %s\n'
)


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("", 'sglang:spec_accept_length{a="b c"} 3.5\nsglang:spec_accept_length{a="d"} 2.5', 3.0),
        ("", "# HELP sglang:spec_accept_length x\nsglang:spec_accept_length 2", 2.0),
        (VLLM % (10, 20), VLLM % (20, 45), 3.5),
        (VLLM % (10, 20), VLLM % (10, 20), None),
        ("", "", None),
        ("", "sglang:spec_accept_length 0.0", None),
        ("", "sglang:spec_accept_length NaN", None),
        ("", "sglang:spec_accept_length -4", None),
        ("", "sglang:spec_accept_length 1e9", None),
        ("", "sglang:spec_accept_length", None),
        (VLLM % (10, 20), VLLM % (20, 10), None),
    ],
)
def test_accept_length(before: str, after: str, found: float | None) -> None:
    assert accept_length(read_counters(before), read_counters(after)) == found
