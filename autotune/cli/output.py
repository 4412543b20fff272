"""Results on stdout, progress and messages on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

# Results: plain when piped. Messages: always stderr, so that ``autotune ... | jq`` sees results only.
stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def fail_line(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    sys.stderr.write("autotune: " + " ".join(message.split()) + "\n")
