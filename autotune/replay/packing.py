"""The rounds of one cell in a few bytes, every time given back to the last bit.

A clock counts ticks, so its microseconds are fractions of few digits that look like noise once divided. Each
route's times are therefore written as the integers that they came from, in the first form that gives back
every value of the series exactly:

    ns      host timers: nanoseconds, value = k / 1000
    sum     sums of CUDA's float32 milliseconds over a group's calls: value = 1000 (m / 2^s) / calls, with m
            in two parts, nanoseconds and the little that float32 could not hold of them
    double  whatever else, eight bytes each

Integers are kept less their minimum and over their common divisor, byte plane by byte plane; whoever stores
many cells compresses them together. Of a round's order only the set of routes is kept and of the readings of
the device nothing: no decision looks at either.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.bench.record import Round

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

# A float32 of some milliseconds is a multiple of 2^-22 of one, a float32 of a few microseconds of 2^-32.
_SHIFTS = (24, 28, 32, 36, 40)
_PARTS = ("run_us", "host_us", "prepare_us")


def pack(rounds: Sequence[Round]) -> bytes:
    """The rounds as bytes, in order; their indices must be 0, 1, 2, ...

    Raises:
        ValueError: a round is missing, or is not in its place.
    """
    if [each.index for each in rounds] != list(range(len(rounds))):
        raise ValueError("rounds must be numbered 0, 1, 2, ... without a gap")
    head: dict[str, Any] = {"rounds": len(rounds), "routes": []}
    if dropped := {each.index: each.dropped for each in rounds if each.dropped}:
        head["dropped"] = dropped
    body = b""
    for name in sorted({name for each in rounds for name in each.order}):
        mine = [each for each in rounds if name in each.run_us]
        calls = np.array([each.calls[name] for each in mine], dtype=np.int64)
        route: dict[str, Any] = {"name": name, "spans": _spans([each.index for each in mine]), "forms": []}
        for series in (_integers(calls), *(_series(mine, part, name, calls) for part in _PARTS)):
            route["forms"].append(series[0])
            body += series[1]
        head["routes"].append(route)
    text = json.dumps(head, separators=(",", ":")).encode()
    return struct.pack("<I", len(text)) + text + body


def unpack(data: bytes) -> list[Round]:
    """Inverse of :func:`pack`; routes of a round are in the order of their names.

    Raises:
        ValueError: these are not the bytes of packed rounds.
    """
    try:
        (length,) = struct.unpack_from("<I", data)
        head = json.loads(data[4 : 4 + length])
        return _unpack(head, memoryview(data)[4 + length :])
    except (struct.error, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"packed rounds that cannot be read: {error}") from None


def _unpack(head: dict[str, Any], body: memoryview) -> list[Round]:
    parts: list[list[dict[str, Any]]] = [[{} for _ in range(head["rounds"])] for _ in range(4)]
    for route in head["routes"]:
        indices = [i for first, last in route["spans"] for i in range(first, last + 1)]
        forms = route["forms"]
        calls, body = _read_integers(forms[0], len(indices), body)
        columns: list[list[Any]] = [calls.tolist()]
        for form in forms[1:]:
            values, body = _read_series(form, calls, body)
            columns.append(values.tolist())
        for part, column in zip(parts, columns, strict=True):
            for i, value in zip(indices, column, strict=True):
                part[i][route["name"]] = value
    dropped = head.get("dropped", {})
    return [
        Round(i, tuple(run), run, host, prepare, calls, dropped=dropped.get(str(i), ""))
        for i, (calls, run, host, prepare) in enumerate(zip(*parts, strict=True))
    ]


def _spans(indices: Iterable[int]) -> list[list[int]]:
    """Runs of consecutive numbers as [first, last]."""
    spans: list[list[int]] = []
    for i in indices:
        if spans and spans[-1][1] == i - 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    return spans


def _series(rounds: Sequence[Round], part: str, name: str, calls: _Ints) -> tuple[dict[str, Any], bytes]:
    values: _Floats = np.array([getattr(each, part)[name] for each in rounds], dtype=np.float64)
    thousandths = np.rint(values * 1000.0)
    if np.abs(thousandths).max() < 2**52 and _equal(thousandths / 1000.0, values):
        form, data = _integers(thousandths.astype(np.int64))
        return {"form": "ns", **form}, data
    sums = values * calls / 1000.0
    if np.abs(sums).max() < 2**11:
        for shift in _SHIFTS:
            whole = np.rint(sums * 2.0**shift)
            if _equal(1000.0 * (whole / 2.0**shift) / calls, values):
                ns = np.rint(sums * 1e6)
                rest = whole - np.rint(ns / 1e6 * 2.0**shift)
                first, one = _integers(ns.astype(np.int64))
                second, other = _integers(rest.astype(np.int64))
                return {"form": "sum", "shift": shift, "ns": first, "rest": second}, one + other
    return {"form": "double"}, _planes(values.astype("<f8"))


def _read_series(form: dict[str, Any], calls: _Ints, body: memoryview) -> tuple[_Floats, memoryview]:
    count = len(calls)
    if form["form"] == "ns":
        ints, body = _read_integers(form, count, body)
        return ints / 1000.0, body
    if form["form"] == "sum":
        scale = 2.0 ** form["shift"]
        ns, body = _read_integers(form["ns"], count, body)
        rest, body = _read_integers(form["rest"], count, body)
        whole = np.rint(ns / 1e6 * scale) + rest
        return 1000.0 * (whole / scale) / calls, body
    if form["form"] == "double":
        return _read_planes(body, count, 8).view("<f8").astype(np.float64), body[8 * count :]
    raise ValueError(f"form {form['form']!r}")


def _equal(one: _Floats, other: _Floats) -> bool:
    return bool(np.array_equal(one, other))


def _integers(values: _Ints) -> tuple[dict[str, Any], bytes]:
    """How the integers are written (bytes each, minimum, divisor), and the bytes: none if all are equal."""
    low = int(values.min())
    divisor = math.gcd(*(values - low).tolist()) or 1
    small = (values - low) // divisor
    high = int(small.max())
    size = next(size for size in (0, 1, 2, 4, 8) if high < 1 << 8 * size)
    form = {"size": size, "low": low, "by": divisor}
    return form, _planes(small.astype(f"<u{size}")) if size else b""


def _read_integers(form: dict[str, Any], count: int, body: memoryview) -> tuple[_Ints, memoryview]:
    size = form["size"]
    if not size:
        return np.full(count, form["low"], dtype=np.int64), body
    small = _read_planes(body, count, size).view(f"<u{size}").astype(np.int64)
    return small * form["by"] + form["low"], body[size * count :]


def _planes(values: npt.NDArray[Any]) -> bytes:
    """All first bytes, then all second ones, ...: what hardly changes then lies together."""
    width = values.dtype.itemsize
    planes: bytes = values.view(np.uint8).reshape(-1, width).T.tobytes()
    return planes


def _read_planes(body: memoryview, count: int, width: int) -> npt.NDArray[np.uint8]:
    """The bytes of ``count`` values, one after the other."""
    planes = np.frombuffer(body, dtype=np.uint8, count=count * width)
    return np.ascontiguousarray(planes.reshape(width, count).T).reshape(-1)
