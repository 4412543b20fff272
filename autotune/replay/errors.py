"""What can be wrong with a recording."""

from __future__ import annotations


class RecordingError(RuntimeError):
    """A file that cannot be replayed: one line, what and where and what to do."""
