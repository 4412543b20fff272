"""One OpenAI-compatible server: generate, flush its cache, read its metrics. Every answer is doubted."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from autotune.engines.ab.errors import ServerError
from autotune.engines.ab.metrics import Counters, read_counters
from autotune.engines.ab.stream import Answer, read_answer

# An engine refuses to flush while a request is still being let go.
FLUSH_TRIES = 3
FLUSH_PAUSE_S = 2.0
# SGLang's, then vLLM's.
FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")
_MOST_BODY = 16 << 20


class Server:
    """One endpoint. Safe to use from several threads: a connection a request."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            url: ``http://host:port``, with a path in front of ``/v1`` if the server has one.
            timeout_s: longest silence of a connection before the server counts as stalled.

        Raises:
            ValueError: not such a URL.
        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"{url}: {error}") from error
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError(f"{url!r} is no server; http://HOST:PORT is needed")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._host, self._port = host, port
        self._secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout, self._sleep = timeout_s, sleep
        self._headers = dict(headers or {})
        self._flush_path: str | None = None

    def model(self) -> str:
        """The first model that it lists. Raises ``ServerError``."""
        listed = self._json("GET", "/v1/models").get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        name = first.get("id") if isinstance(first, dict) else None
        if not isinstance(name, str) or not name:
            raise ServerError(self.url, "lists no model under /v1/models; name one with --model")
        return name

    def flush(self) -> None:
        """Empty its prefix cache: up to 3 tries, 2 s apart.

        Raises:
            ServerError: the last try's problem; or it has neither SGLang's nor vLLM's way to do it.
        """
        paths = (self._flush_path,) if self._flush_path else FLUSH_PATHS
        for attempt in range(1, FLUSH_TRIES + 1):
            try:
                for path in paths:
                    status, body = self._request("POST", path)
                    if status in (404, 405) and self._flush_path is None:
                        continue
                    if status != 200:
                        raise ServerError(
                            self.url, f"POST {path} answered {status}: {_line(body)} (try {attempt})"
                        )
                    self._flush_path = path
                    return
                break
            except ServerError:
                if attempt == FLUSH_TRIES:
                    raise
                self._sleep(FLUSH_PAUSE_S)
        raise ServerError(
            self.url,
            f"has neither {' nor '.join(FLUSH_PATHS)}; the cache cannot be emptied (vLLM offers it with "
            "VLLM_SERVER_DEV_MODE=1). --no-flush compares with caches as they are",
        )

    def generate(self, prompt: str, max_tokens: int, model: str) -> Answer:
        """One greedy completion of exactly ``max_tokens``, streamed. Raises ``ServerError``."""
        asked = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        with self._open("POST", "/v1/completions", json.dumps(asked).encode()) as response:
            if response.status != 200:
                raise ServerError(
                    self.url, f"POST /v1/completions answered {response.status}: {_line(response.read(4096))}"
                )
            return read_answer(
                iter(lambda: response.readline(_MOST_BODY), b""),
                url=self.url,
                wanted=max_tokens,
                quiet_s=self._timeout,
                clock=lambda: time.perf_counter() - start,
            )

    def counters(self) -> Counters:
        """What its metrics say of speculative decoding; empty where it offers none. Never raises."""
        try:
            status, body = self._request("GET", "/metrics")
        except ServerError:
            return Counters()
        return read_counters(body.decode("utf-8", "replace")) if status == 200 else Counters()

    def wait_until_ready(self, limit_s: float, pause_s: float = 1.0) -> None:
        """Poll ``/v1/models`` after a restart. Raises ``ServerError`` with the last problem."""
        end = time.monotonic() + limit_s
        while True:
            try:
                self.model()
                return
            except ServerError as error:
                if time.monotonic() >= end:
                    raise ServerError(
                        self.url, f"is not ready after {limit_s:.0f} s: {error.problem}"
                    ) from error
                self._sleep(pause_s)

    def _json(self, method: str, path: str) -> dict[str, Any]:
        status, body = self._request(method, path)
        if status != 200:
            raise ServerError(self.url, f"{method} {path} answered {status}: {_line(body)}")
        try:
            data = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ServerError(self.url, f"{method} {path} answered no JSON: {_line(body)}") from error
        if not isinstance(data, dict):
            raise ServerError(self.url, f"{method} {path} answered no object: {_line(body)}")
        return data

    def _request(self, method: str, path: str) -> tuple[int, bytes]:
        with self._open(method, path, None) as response:
            body = response.read(_MOST_BODY + 1)
            if len(body) > _MOST_BODY:
                raise ServerError(self.url, f"{method} {path} answered more than {_MOST_BODY} bytes")
            return response.status, body

    @contextmanager
    def _open(self, method: str, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        """One request on a connection of its own; whatever the network does is a ``ServerError``."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        headers = {**self._headers, "Accept": "*/*"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, self._path + path, body=body, headers=headers)
            yield connection.getresponse()
        except TimeoutError as error:
            raise ServerError(
                self.url, f"{method} {path}: nothing came for {self._timeout:g} s; it has stalled"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise ServerError(self.url, f"{method} {path}: {text}") from error
        finally:
            connection.close()


def _line(body: bytes) -> str:
    return " ".join(body[:4096].decode("utf-8", "replace").split())[:200] or "nothing"
