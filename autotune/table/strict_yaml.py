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
    from collections.abc import Callable

Value: TypeAlias = "str | int | float | bool | list[Value] | dict[str, Value] | None"

# entries > eager > batch_size > interval is depth 5; nothing in a table is deeper than that.
MAX_DEPTH = 8

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NODES = frozenset((yaml.ScalarEvent, yaml.SequenceStartEvent, yaml.MappingStartEvent))
_PLAIN_KEY = re.compile(r"[a-z_][a-z0-9_]*")
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?[0-9]{1,20}\.[0-9]{1,20}(e[-+][0-9]{1,3})?")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


def parse(text: str) -> Value:
    """The one document in ``text``.

    Raises:
        TableError: outside this subset, or not YAML; the place is a line number, counted from 1.
    """
    if (tab := text.find("\t")) >= 0:
        raise TableError(f"line {text.count(chr(10), 0, tab) + 1}", "a tab; indent with spaces")
    try:
        loader = _LOADER(text)
        try:
            return _Reader(loader.get_event).document()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
        place = f"line {mark.line + 1}" if mark else "YAML"
        raise TableError(place, f"{problem}; export the table again") from error


class _Reader:
    """From events to values. Most of a table is numbers, so the way from an event to one is short."""

    __slots__ = ("_next", "_plain")

    def __init__(self, get_event: Callable[[], yaml.Event]) -> None:
        self._next = get_event
        self._plain: dict[str, Value] = dict(_WORDS)  # plain scalars that were read before: ratios recur

    def document(self) -> Value:
        self._next()  # stream start
        if not isinstance(self._next(), yaml.DocumentStartEvent):
            raise TableError("line 1", "empty; export the table again")
        value = self._value(self._next(), 1)
        self._next()  # document end
        if not isinstance(more := self._next(), yaml.StreamEndEvent):
            raise _error(more, "a second document; a table is one document")
        return value

    def _value(self, event: Any, depth: int) -> Value:
        kind = type(event)
        if kind not in _NODES or event.anchor is not None:
            raise _error(event, "an anchor or alias; write the value out")
        if event.tag is not None:
            raise _error(event, f"a tag {show(event.tag)}; tables have none")
        if kind is yaml.ScalarEvent:
            return self._scalar(event)
        if depth > MAX_DEPTH:
            raise _error(event, f"nested deeper than {MAX_DEPTH} levels")
        return self._sequence(depth) if kind is yaml.SequenceStartEvent else self._mapping(depth)

    def _sequence(self, depth: int) -> list[Value]:
        items: list[Value] = []
        following, plain = self._next, self._plain
        while type(event := following()) is not yaml.SequenceEndEvent:
            if (
                type(event) is yaml.ScalarEvent
                and not event.style
                and event.value in plain
                and event.anchor is None
                and event.tag is None
            ):
                items.append(plain[event.value])
            else:
                items.append(self._value(event, depth + 1))
        return items

    def _mapping(self, depth: int) -> dict[str, Value]:
        mapping: dict[str, Value] = {}
        following = self._next
        while type(event := following()) is not yaml.MappingEndEvent:
            key = _key(event)
            if key in mapping:
                raise _error(event, f"key {show(key)} appears twice; keep one")
            mapping[key] = self._value(following(), depth + 1)
        return mapping

    def _scalar(self, event: yaml.ScalarEvent) -> Value:
        text: str = event.value
        if event.style in ("'", '"'):
            return text
        if event.style:
            raise _error(event, "a block scalar; use a quoted string")
        if text in self._plain:
            return self._plain[text]
        value: Value
        if _INTEGER.fullmatch(text):
            value = int(text)
        elif _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
            value = number
        else:
            raise _error(event, f"{show(text)} is not a number, true, false or null; quote strings")
        self._plain[text] = value
        return value


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
