"""``autotune.engines``: every message at most once per process, and no handler may end serving."""

from __future__ import annotations

import logging

_LOGGER = logging.getLogger("autotune.engines")
# Keys are a few kinds of trouble, not values of calls; the bound is for a caller that forgets it.
_MOST = 256


class Once:
    """Logs one line per key."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, key: str, message: str, level: int = logging.WARNING) -> bool:
        """Whether this was the first time; the line is folded to one."""
        if key in self._seen or len(self._seen) >= _MOST:
            return False
        self._seen.add(key)
        say(message, level)
        return True


def say(message: str, level: int = logging.WARNING) -> None:
    """One line; never raises."""
    try:
        _LOGGER.log(level, "autotune: %s", " ".join(message.split()))
    except Exception:  # a handler or a filter is foreign code
        return


def start_level() -> int:
    """INFO where that is shown. vLLM sets up its own logger only, and one line at start must be seen."""
    return logging.INFO if _LOGGER.isEnabledFor(logging.INFO) else logging.WARNING


def told(error: BaseException) -> str:
    """An exception in one short line."""
    try:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    except Exception:
        return type(error).__name__
