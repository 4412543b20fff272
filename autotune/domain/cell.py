"""Columns (what is proven) and cells (what is timed and decided)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotune.domain.dtypes import DTypes
from autotune.domain.identity import stable_id
from autotune.domain.shape import Shape, is_integer


@dataclass(frozen=True)
class Column:
    """One shape, dtypes, q_len and batch size: the unit of a safety proof.

    Attributes:
        q_len: query tokens per request in one call (accept length, SGLang's ``num_draft_tokens``).
        batch_size: requests per call; an exact capture size.
        max_context: the engine's maximum context in tokens; it fixes the page table's width and
            ``max_seq_len``, which change the kernel's KV split.
        interval: None for a captured size. ``(low, high)`` makes this column the sampled interior of an
            eager interval: ``low < batch_size < high``, and the proof must hold at every batch inside.
        pad_value: ``seq_lens`` of the rows with which the engine pads a batch, 0 to ``max_context``. Part of
            what is proven: one engine's proof does not count for another that pads differently.

    Raises:
        ValueError: a number is no integer or out of its range.
    """

    shape: Shape
    dtypes: DTypes
    q_len: int
    batch_size: int
    max_context: int
    interval: tuple[int, int] | None = None
    pad_value: int = 1

    def __post_init__(self) -> None:
        for name in ("q_len", "batch_size", "max_context"):
            value = getattr(self, name)
            if not is_integer(value) or value <= 0:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        if self.q_len > self.max_context:
            raise ValueError(f"q_len {self.q_len} exceeds max_context {self.max_context}")
        if not is_integer(self.pad_value) or not 0 <= self.pad_value <= self.max_context:
            raise ValueError(f"pad_value must be an integer in 0..{self.max_context}, not {self.pad_value!r}")
        if self.interval is not None:
            if len(self.interval) != 2 or not all(is_integer(end) for end in self.interval):
                raise ValueError(f"interval must be two integers, not {self.interval!r}")
            if not self.interval[0] < self.batch_size < self.interval[1]:
                raise ValueError(f"batch_size {self.batch_size} is not inside the interval {self.interval}")

    @property
    def table_width(self) -> int:
        """Pages per row of the engine's page table: wide enough for ``max_context``."""
        return -(-self.max_context // self.shape.page_size)

    @property
    def rows(self) -> int:
        """Query rows of the call: batch_size x q_len."""
        return self.batch_size * self.q_len

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the identity is computed from exactly these."""
        data = {
            "shape": self.shape.to_dict(),
            "dtypes": self.dtypes.to_dict(),
            "q_len": self.q_len,
            "batch_size": self.batch_size,
            "max_context": self.max_context,
            "interval": list(self.interval) if self.interval else None,
        }
        # left out where it is the usual one: ids in stored studies stay as they are
        return data if self.pad_value == 1 else {**data, "pad_value": self.pad_value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Column:
        """Inverse of :meth:`to_dict`; raises ``ValueError`` or ``KeyError`` on foreign data."""
        interval = data.get("interval")
        return cls(
            shape=Shape.from_dict(data["shape"]),
            dtypes=DTypes.from_dict(data["dtypes"]),
            q_len=data["q_len"],
            batch_size=data["batch_size"],
            max_context=data["max_context"],
            interval=(interval[0], interval[1]) if interval else None,
            pad_value=data.get("pad_value", 1),
        )

    @cached_property
    def id(self) -> str:
        """12 hex digits, equal on every machine."""
        return stable_id(self.to_dict())

    def __str__(self) -> str:
        shape = self.shape
        heads = f"{shape.num_qo_heads}/{shape.num_kv_heads}/{shape.head_dim}"
        inside = f" in {self.interval[0]}..{self.interval[1]}" if self.interval else ""
        padded = f" pad {self.pad_value}" if self.pad_value != 1 else ""
        return (
            f"{heads} page {shape.page_size} {self.dtypes.q}/{self.dtypes.kv} "
            f"q_len {self.q_len} batch {self.batch_size}{inside}{padded}"
        )


@dataclass(frozen=True)
class Cell:
    """A column and a KV row: total KV lengths ``kv_low .. kv_high`` (both inclusive, new tokens included)."""

    column: Column
    kv_low: int
    kv_high: int

    def __post_init__(self) -> None:
        for name in ("kv_low", "kv_high"):
            if not is_integer(getattr(self, name)):
                raise ValueError(f"{name} must be an integer, not {getattr(self, name)!r}")
        if not self.column.q_len <= self.kv_low <= self.kv_high <= self.column.max_context:
            raise ValueError(
                f"kv interval {self.kv_low}..{self.kv_high} must lie in "
                f"{self.column.q_len}..{self.column.max_context}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the identity is computed from exactly these."""
        return {"column": self.column.to_dict(), "kv_low": self.kv_low, "kv_high": self.kv_high}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Cell:
        """Inverse of :meth:`to_dict`."""
        return cls(Column.from_dict(data["column"]), data["kv_low"], data["kv_high"])

    @cached_property
    def id(self) -> str:
        """12 hex digits, equal on every machine."""
        return stable_id(self.to_dict())

    def __str__(self) -> str:
        return f"{self.column} kv {self.kv_low}..{self.kv_high}"
