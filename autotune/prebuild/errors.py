"""What stops a prebuild."""

from __future__ import annotations


class PrebuildError(RuntimeError):
    """One line: what is missing or failed, where, and what to do."""
