"""``--budget``: a positive duration such as ``60s``, ``10m`` or ``1h30m``."""

from __future__ import annotations

import re

from autotune.cli.exits import CliError, Exit

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_FORM = re.compile(r"(?:\d+(?:\.\d+)?[smh])+|\d+(?:\.\d+)?")


def seconds(text: str) -> float:
    """Seconds in ``text``; a bare number counts seconds.

    Raises:
        CliError: not a duration, or not positive (exit 2).
    """
    text = text.strip().lower()
    if not _FORM.fullmatch(text):
        raise CliError(f"--budget {text!r} is not a duration; write 90, 90s, 10m or 1h30m", Exit.USAGE)
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh]?)", text)
    total = sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)
    if total <= 0:
        raise CliError("--budget must be more than 0; leave it out to run without a limit", Exit.USAGE)
    return total
