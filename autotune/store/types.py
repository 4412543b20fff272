"""Column types that give back exactly what was stored, on SQLite and PostgreSQL alike."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import DateTime, Dialect, Double, Text
from sqlalchemy.types import TypeDecorator


def utc_now() -> datetime:
    """Now, aware, in UTC."""
    return datetime.now(timezone.utc)


# Compact JSON; raises ``ValueError`` on NaN and infinity, which PostgreSQL's JSON refuses. Made once:
# json.dumps makes a new encoder for every call with options.
dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class UtcDateTime(TypeDecorator[datetime]):
    """Aware datetimes in UTC. SQLite has no time zones: there the text is UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"timestamp {value} has no time zone")
        value = value.astimezone(timezone.utc)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


class ExactFloat(TypeDecorator[float]):
    """64-bit floats, NaN included: the error of a kernel that writes NaN is NaN, and SQLite makes that NULL.

    SQLite gets the text ``NaN`` instead, which its REAL affinity leaves alone and sorts above every number,
    as PostgreSQL does.
    """

    impl = Double
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any] | None:
        """In place of ``process_bind_param``, after which Double would turn the text into a float again."""
        return _nan_as_text if dialect.name == "sqlite" else super().bind_processor(dialect)

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        return None if value is None else float(value)


def _nan_as_text(value: float | None) -> float | str | None:
    return "NaN" if value is not None and math.isnan(value) else value


class SafeText(TypeDecorator[str]):
    """Text that may come from a dying child: NUL and lone surrogates, which databases refuse, are escaped."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
