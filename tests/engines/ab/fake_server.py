"""A real HTTP server with as much of the OpenAI API as a comparison needs, which misbehaves on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """Serves on a free port of this machine.

    Attributes:
        token_s: seconds a token; ``step`` tokens come in one piece of text.
        fault: what goes wrong, one of the names in ``Handler``.
        flush: statuses that the next flushes answer; 200 when it is used up. ``flush_path``: which engine it
        is.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.token_s, self.step = 0.0, 2
        self.fault = ""
        self.flush: list[int] = []
        self.flush_path = "/flush_cache"
        self.metrics = 'sglang:spec_accept_length{tp_rank="0"} 3.25\n'
        self.seen: list[tuple[str, Any]] = []
        self.most_at_once = self._at_once = 0
        self.lock = threading.Lock()
        self.stop = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]

    @contextmanager
    def working(self) -> Iterator[None]:
        with self.lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield
        finally:
            with self.lock:
                self._at_once -= 1


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        return

    def _answer(self, status: int, body: str, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        server = self.server
        server.seen.append((self.path, None))
        if self.path == "/v1/models":
            listed = [] if server.fault == "no-model" else [{"id": "a-model"}]
            self._answer(200, "not json" if server.fault == "no-json" else json.dumps({"data": listed}))
        elif self.path == "/metrics" and server.metrics:
            self._answer(200, server.metrics, "text/plain")
        else:
            self._answer(404, "{}")

    def do_POST(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.seen.append((self.path, json.loads(body) if body else dict(self.headers)))
        if self.path == server.flush_path:
            status = server.flush.pop(0) if server.flush else 200
            self._answer(status, "" if status == 200 else f"requests are running ({len(server.flush)} left)")
        elif self.path == "/v1/completions":
            with server.working():
                self._complete(json.loads(body))
        else:
            self._answer(404, "{}")

    def _send(self, event: Any) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def _complete(self, asked: dict[str, Any]) -> None:
        server, fault = self.server, self.server.fault
        if fault == "500":
            self._answer(500, '{"error": "out of memory"}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        wanted, made = asked["max_tokens"], 0
        while made < wanted:
            if fault == "stall" and made >= wanted // 2:
                server.stop.wait(60)
                return
            if fault == "stall-with-comments" and made >= wanted // 2:
                while not server.stop.wait(0.02):
                    self.wfile.write(b": still here\n\n")
                    self.wfile.flush()
                return
            if fault == "cut" and made >= wanted // 2:
                return
            if fault == "error-event" and made >= wanted // 2:
                self._send({"error": {"message": "illegal memory access"}})
                return
            count = min(server.step, wanted - made)
            time.sleep(count * server.token_s)
            pieces = 3 * count if fault == "more-pieces" else 1
            for _ in range(pieces):
                self._send({"choices": [{"text": "" if fault == "no-text" else "word " * count}]})
            made += count
            if fault == "endless":
                made = 0
        said = {"short": wanted - 1, "boast": 10 * wanted}.get(fault, wanted)
        if fault == "no-usage":
            self._send({"choices": []})
        elif fault == "garbage":
            self._send("{")
        else:
            self._send({"choices": [], "usage": {"completion_tokens": said}})
        if fault != "no-done":
            self._send("[DONE]")


@contextmanager
def serving() -> Iterator[FakeServer]:
    """A server on a thread of this process, gone at the end."""
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop.set()
        server.shutdown()
        server.server_close()
        thread.join(30)
