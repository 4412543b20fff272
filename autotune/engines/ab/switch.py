"""One server whose mode is switched between turns, by a command of the operator's."""

from __future__ import annotations

import shlex
import subprocess

from autotune.engines.ab.errors import ServerError
from autotune.engines.ab.server import Server


class Switch:
    """Runs ``COMMAND a`` or ``COMMAND b`` where the side changes, and waits until the server answers."""

    def __init__(self, command: str, *, limit_s: float = 900.0) -> None:
        """Raises ``ValueError`` for a command that cannot be split into words."""
        self._words = shlex.split(command)
        if not self._words:
            raise ValueError("the switch command is empty")
        self._limit_s = limit_s
        self._side = ""

    def __call__(self, server: Server, side: str) -> None:
        """Raises ``ServerError``: the command failed or ran too long, or the server does not come back."""
        if side == self._side:
            return
        self._side = ""
        said = " ".join([*self._words, side])
        try:
            done = subprocess.run(
                [*self._words, side],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._limit_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServerError(server.url, f"the switch {said!r} did not work: {error}") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ServerError(server.url, f"the switch {said!r} ended with {done.returncode}: {last[:200]}")
        server.wait_until_ready(self._limit_s)
        self._side = side
