"""What ends a comparison, in one line: which server, what it did, what to do."""

from __future__ import annotations


class ServerError(Exception):
    """A server failed, stalled, or answered something that cannot be right."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"{url}: {problem}")
        self.url = url
        self.problem = problem
