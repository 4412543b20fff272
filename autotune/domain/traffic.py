"""Counts of the calls that an engine makes: what it writes as JSON lines, and what a search weighs cells by.

One line a shape: ``{"batch": 16, "q_len": 4, "kv": 8192, "count": 1203}``. ``kv`` is the upper end of the
bucket that the longest request fell into (a power of two), or null where the length was not on the host.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

KEYS = ("batch", "q_len", "kv", "count")


def bucket(kv_len: int) -> int:
    """The least power of two that is not below ``kv_len``."""
    return 1 << max(0, kv_len - 1).bit_length()


@dataclass(frozen=True, slots=True)
class ShapeCount:
    """How often one shape was called.

    Attributes:
        batch: requests of a call.
        q_len: query tokens a request.
        kv: upper end of the bucket of the longest KV length; None: not known.
        count: calls, or steps of a model; only shares matter.
    """

    batch: int
    q_len: int
    kv: int | None
    count: int

    def line(self) -> str:
        """The JSON line, without its end."""
        return json.dumps({"batch": self.batch, "q_len": self.q_len, "kv": self.kv, "count": self.count})

    @classmethod
    def parse(cls, line: str) -> ShapeCount:
        """Inverse of :meth:`line`.

        Raises:
            ValueError: not such a line; the message names the key.
        """
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"must be an object with {', '.join(KEYS)}")
        for key in data:
            if key not in KEYS:
                raise ValueError(f"{key}: unknown key; allowed: {', '.join(KEYS)}")
        for key in KEYS:
            if key not in data:
                raise ValueError(f"{key}: missing")
            value = data[key]
            if key == "kv" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                wanted = "a positive integer or null" if key == "kv" else "a positive integer"
                shown = json.dumps(value)
                raise ValueError(f"{key}: must be {wanted}, not {shown[:40]}")
        return cls(**data)
