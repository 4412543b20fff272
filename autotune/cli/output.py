"""Results on stdout, progress and messages on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

# A line is as long as what it says: a terminal folds it where its window ends, a file keeps it whole.
_WIDTH = 100_000

# Colour only on a terminal, which Rich finds out for the stream that is open when something is printed.
stderr = Console(stderr=True, highlight=False)
_stdout = Console(highlight=False, width=_WIDTH)


def print_text(shown: RenderableType) -> None:
    """A result for people on stdout; a plain string is shown as it is, without markup."""
    with _stdout.capture() as captured:
        _stdout.print(Text(shown) if isinstance(shown, str) else shown, soft_wrap=True)
    _write(captured.get())


def print_json(data: Any) -> None:
    """One JSON document on stdout; what JSON has no number for (NaN, infinity) becomes a string."""
    _write(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def note(message: str) -> None:
    """A message on stderr that ends nothing, in one line."""
    stderr.print(Text(_line(message), style="yellow"), soft_wrap=True)


def fail_line(message: str) -> None:
    """The one line on stderr that says why the command ended, whatever the message holds."""
    sys.stderr.write(_line(message) + "\n")


def _line(message: str) -> str:
    return "autotune: " + " ".join(message.split())


def _write(text: str) -> None:
    """Write a result at once. A reader that has gone (``| head``) has seen enough: that is no failure."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # the interpreter flushes once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data
