"""One streamed completion: its tokens, their times, and whether they can be what the server says they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from autotune.engines.ab.errors import ServerError

# A token is a few characters; a server that sends more than this for one is no language model.
_MOST_BYTES_A_TOKEN = 4096
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion.

    Attributes:
        tokens: output tokens, as the server counts them.
        first_s, last_s: seconds from the request to the first and the last text.
        chunks: events that held text; several tokens may share one.
        text: what was generated.
    """

    tokens: int
    first_s: float
    last_s: float
    chunks: int
    text: str

    @property
    def per_token_s(self) -> float | None:
        """Time per output token after the first text; None where everything came at once."""
        spent = self.last_s - self.first_s
        return spent / (self.tokens - 1) if self.tokens > 1 and self.chunks > 1 and spent > 0 else None


def read_answer(
    lines: Iterable[bytes], *, url: str, wanted: int, quiet_s: float, clock: Callable[[], float]
) -> Answer:
    """Read server-sent events until ``[DONE]``.

    Args:
        wanted: tokens that were asked for; the end-of-sequence token is ignored, so exactly these must come.
        quiet_s: longest time without text, whatever else comes: a stalled server may send comments for ever.
        clock: seconds since the request was sent.

    Raises:
        ServerError: an error event, a stream that ends early, or a count that cannot be.
    """
    text: list[str] = []
    tokens: int | None = None
    first = last = 0.0
    chunks = size = 0
    done = False
    for line in lines:
        size += len(line)
        if size > _LEAST_BYTES + wanted * _MOST_BYTES_A_TOKEN:
            raise ServerError(url, f"sent {size} bytes for {wanted} tokens")
        if clock() - last > quiet_s:
            raise ServerError(url, f"sent no text for {quiet_s:g} s after {chunks} pieces; it has stalled")
        event = line.strip()
        if not event.startswith(b"data:"):
            continue
        body = event[5:].strip()
        if body == b"[DONE]":
            done = True
            break
        data = _json(body, url)
        if data.get("error"):
            raise ServerError(url, f"answered an error in the stream: {str(data['error'])[:200]}")
        piece = _text(data)
        if piece:
            last = clock()
            first = first if chunks else last
            chunks += 1
            text.append(piece)
        usage = data.get("usage")
        if isinstance(usage, dict) and type(usage.get("completion_tokens")) is int:
            tokens = usage["completion_tokens"]
    if not done:
        raise ServerError(url, f"the stream ended after {chunks} pieces of text without [DONE]")
    if tokens is None:
        raise ServerError(url, "does not say how many tokens it made (stream_options.include_usage)")
    if tokens != wanted:
        raise ServerError(
            url,
            f"says that it made {tokens} tokens; {wanted} were asked for with ignore_eos, so a rate of "
            "its tokens compares nothing",
        )
    if not chunks:
        raise ServerError(url, f"says that it made {tokens} tokens and sent no text")
    if chunks > tokens:
        raise ServerError(url, f"says that it made {tokens} tokens and sent {chunks} pieces of text")
    return Answer(tokens, first, last, chunks, "".join(text))


def _json(body: bytes, url: str) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ServerError(url, f"sent an event that is no JSON: {body[:80]!r}") from error
    if not isinstance(data, dict):
        raise ServerError(url, f"sent an event that is no object: {body[:80]!r}")
    return data


def _text(data: dict[str, Any]) -> str:
    choices = data.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    piece = first.get("text") if isinstance(first, dict) else None
    return piece if isinstance(piece, str) else ""
