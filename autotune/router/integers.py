"""Which of a caller's values are integers."""

from __future__ import annotations

from numbers import Integral

_TRUTH: type = bool


def as_integer(value: object) -> int | None:
    """``value`` if its type is an integer's, Python's or NumPy's, and not a truth value; else None.

    A tensor is not asked: reading one would synchronise with the device and break a graph capture.
    """
    if type(value) is int:
        return value
    try:
        return int(value) if isinstance(value, Integral) and not isinstance(value, _TRUTH) else None
    except Exception:  # a foreign class may do anything
        return None
