"""The router's logger, made when the first line is due: importing logging costs a fifth of the import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import Logger


def logger() -> Logger:
    """``autotune.router``; logging keeps one object per name."""
    import logging

    return logging.getLogger("autotune.router")
