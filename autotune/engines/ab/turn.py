"""One case on one server: its cache flushed, then as many requests at once as the case says."""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from autotune.engines.ab.errors import ServerError
from autotune.engines.ab.metrics import accept_length
from autotune.engines.ab.server import Server

_WORDS = (
    *("river", "stone", "carries", "light", "under", "the", "old", "bridge", "while", "seven", "clerks"),
    *("count", "grain", "and", "a", "slow", "train", "leaves", "for", "another", "city", "where", "nobody"),
    *("remembers", "its", "first", "engineer", "or", "why", "clock", "towers", "face", "north"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked of both servers.

    Attributes:
        concurrency: requests at once; 1 is the latency of a single user.
        prompt_words: length of each prompt, in words of a few letters.
        max_tokens: output tokens of each request.
    """

    concurrency: int
    prompt_words: int
    max_tokens: int

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}, {self.prompt_words} words in, {self.max_tokens} tokens out"


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn measured.

    Attributes:
        tokens_per_s: output tokens of all requests over the time from the first request to the last text.
        per_token_s: median over requests of the time per output token after the first; None where no request
            had two pieces of text.
        accept: accept length of this turn where the server offers it.
        texts: the answers, in the order of the prompts.
    """

    tokens_per_s: float
    per_token_s: float | None
    accept: float | None
    texts: tuple[str, ...]


def prompts(case: Case, seed: str) -> list[str]:
    """Prompts of a round: the same for both servers, none that a cache has seen in another round."""
    chance = random.Random(seed)
    return [
        f"Round {seed}, request {index}: " + " ".join(chance.choices(_WORDS, k=case.prompt_words))
        for index in range(case.concurrency)
    ]


def take_turn(server: Server, case: Case, model: str, seed: str, *, flush: bool) -> Turn:
    """Run it. Raises ``ServerError``: of several requests that failed, the first in order."""
    if flush:
        server.flush()
    asked = prompts(case, seed)
    before = server.counters()
    start = time.perf_counter()
    with ThreadPoolExecutor(case.concurrency, thread_name_prefix="ab") as pool:
        pending = [pool.submit(server.generate, prompt, case.max_tokens, model) for prompt in asked]
        answers = [item.result() for item in pending]
    spent = time.perf_counter() - start
    if spent <= 0:
        raise ServerError(server.url, "answered in no time")
    each = [answer.per_token_s for answer in answers if answer.per_token_s is not None]
    return Turn(
        sum(answer.tokens for answer in answers) / spent,
        statistics.median(each) if each else None,
        accept_length(before, server.counters()),
        tuple(answer.text for answer in answers),
    )
