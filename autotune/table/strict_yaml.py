"""The small part of YAML that a table uses, read without guessing.

Built on PyYAML's events, not its constructors: strings are always quoted, and a plain value is an integer,
a decimal fraction, ``true``, ``false`` or ``null``, nothing else. So an all-digit study id, a commit
``1e5`` or a timestamp can never turn into a number or a date. Anchors, aliases, tags, block scalars,
tabs, duplicate keys and further documents are refused.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from autotune.table.errors import TableError, show

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Value: TypeAlias = "str | int | float | bool | list[Value] | dict[str, Value] | None"

# entries > eager > batch_size > interval is depth 5; nothing in a table is deeper than that.
MAX_DEPTH = 8

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NODES = frozenset((yaml.ScalarEvent, yaml.SequenceStartEvent, yaml.MappingStartEvent))
_PLAIN_KEY = re.compile(r"[a-z_][a-z0-9_]*")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?[0-9]{1,20}\.[0-9]{1,20}(e[-+][0-9]{1,3})?")
_ROW = re.compile(r'^( *"[0-9]+": )\[([-+.0-9a-z]+(?:, [-+.0-9a-z]+)*)\]$', re.MULTILINE)
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


def parse(text: str) -> Value:
    """The one document in ``text``.

    Raises:
        TableError: outside this subset, or not YAML; the place is a line number, counted from 1.
    """
    if (tab := text.find("\t")) >= 0:
        raise TableError(f"line {text.count(chr(10), 0, tab) + 1}", "a tab; indent with spaces")
    shorter = without_rows(text)
    if shorter is not None:
        try:
            return read(*shorter)
        except TableError:
            pass  # read as it stands, it may be sound; if not, the message should quote what stands there
    return read(text)


def read(text: str, rows: Sequence[list[Value]] = ()) -> Value:
    """The document in ``text``, where the plain scalar ``~3`` stands for ``rows[3]``.

    Raises:
        TableError: as :func:`parse`; or the rows did not turn up one by one, in order, each where a value is.
    """
    try:
        loader = _LOADER(text)
        try:
            return _Reader(loader.get_event, rows).document()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
        place = f"line {mark.line + 1}" if mark else "YAML"
        raise TableError(place, f"{problem}; export the table again") from error


def without_rows(text: str) -> tuple[str, list[list[Value]]] | None:
    """``text`` with each row of numbers replaced by ``~`` and its index, and the rows; None if it may not be.

    Most of a table are rows such as ``"1024": [1.25, null]``, and YAML takes several times as long for one as
    this does. A line of that form inside a longer string is replaced too; then its index is missing among the
    values and :func:`read` says so.
    """
    if "~" in text:
        return None
    known: dict[str, Value] = {}
    rows: list[list[Value]] = []

    def set_aside(line: re.Match[str]) -> str:
        row: list[Value] = []
        for number in line[2].split(", "):
            if number not in known:
                known[number] = plain(number)
            row.append(known[number])
        rows.append(row)
        return f"{line[1]}~{len(rows) - 1}"

    try:
        return _ROW.sub(set_aside, text), rows
    except ValueError:
        return None


def plain(text: str) -> Value:
    """What an unquoted scalar means; raises ``ValueError`` for one that tables do not have."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    raise ValueError(text)


class _Reader:
    """From events to values."""

    __slots__ = ("_next", "_rows", "_used")

    def __init__(self, get_event: Callable[[], yaml.Event], rows: Sequence[list[Value]]) -> None:
        self._next = get_event
        self._rows = rows
        self._used = 0

    def document(self) -> Value:
        self._next()  # stream start
        if not isinstance(self._next(), yaml.DocumentStartEvent):
            raise TableError("line 1", "empty; export the table again")
        value = self._value(self._next(), 1)
        self._next()  # document end
        if not isinstance(more := self._next(), yaml.StreamEndEvent):
            raise _error(more, "a second document; a table is one document")
        if self._used != len(self._rows):
            raise TableError("rows", f"{self._used} of {len(self._rows)} are values")
        return value

    def _value(self, event: Any, depth: int) -> Value:
        kind = type(event)
        if kind not in _NODES or event.anchor is not None:
            raise _error(event, "an anchor or alias; write the value out")
        if event.tag is not None:
            raise _error(event, f"a tag {show(event.tag)}; tables have none")
        if kind is yaml.ScalarEvent:
            return self._scalar(event, depth)
        if depth > MAX_DEPTH:
            raise _error(event, f"nested deeper than {MAX_DEPTH} levels")
        return self._sequence(depth) if kind is yaml.SequenceStartEvent else self._mapping(depth)

    def _sequence(self, depth: int) -> list[Value]:
        items: list[Value] = []
        while type(event := self._next()) is not yaml.SequenceEndEvent:
            items.append(self._value(event, depth + 1))
        return items

    def _mapping(self, depth: int) -> dict[str, Value]:
        mapping: dict[str, Value] = {}
        while type(event := self._next()) is not yaml.MappingEndEvent:
            key = _key(event)
            if key in mapping:
                raise _error(event, f"key {show(key)} appears twice; keep one")
            mapping[key] = self._value(self._next(), depth + 1)
        return mapping

    def _scalar(self, event: yaml.ScalarEvent, depth: int) -> Value:
        text: str = event.value
        if event.style in ("'", '"'):
            return text
        if event.style:
            raise _error(event, "a block scalar; use a quoted string")
        if text[:1] == "~" and text == f"~{self._used}" and self._used < len(self._rows):
            if depth > MAX_DEPTH:
                raise _error(event, f"nested deeper than {MAX_DEPTH} levels")
            self._used += 1
            return self._rows[self._used - 1]
        try:
            return plain(text)
        except ValueError:
            problem = f"{show(text)} is not a number, true, false or null; quote strings"
            raise _error(event, problem) from None


def _key(event: yaml.Event) -> str:
    if type(event) is not yaml.ScalarEvent or event.anchor is not None or event.tag is not None:
        raise _error(event, "a key that is not a plain word or a quoted string")
    text: str = event.value
    if event.style in ("'", '"') or _PLAIN_KEY.fullmatch(text):
        return text
    raise _error(event, f"key {show(text)} must be quoted")


def _error(event: yaml.Event, problem: str) -> TableError:
    mark = event.start_mark
    return TableError(f"line {mark.line + 1}" if mark else "YAML", problem)
