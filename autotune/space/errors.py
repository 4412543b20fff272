"""Faults in a search-space, model or engine file; each message is one line."""

from __future__ import annotations

from typing import ClassVar


class SpaceError(ValueError):
    """A file or a filter that cannot be used: which file, which key, what is allowed."""

    exit_code: ClassVar[int] = 2


class UnknownProfile(SpaceError):  # noqa: N818
    """``--gpu`` names no profile; the message lists them."""
