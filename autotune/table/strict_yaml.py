"""The small part of YAML that a table uses, read without guessing.

Built on PyYAML's events, not its constructors: strings are always quoted, and a plain value is an integer,
a decimal fraction, ``true``, ``false`` or ``null``, nothing else. So an all-digit study id, a commit
``1e5`` or a timestamp can never turn into a number or a date. Anchors, aliases, tags, block scalars,
tabs, duplicate keys and further documents are refused.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, TypeAlias

import yaml

from autotune.table.errors import TableError, show

if TYPE_CHECKING:
    from collections.abc import Iterator

Value: TypeAlias = "str | int | float | bool | list[Value] | dict[str, Value] | None"

# entries > eager > batch_size > interval is depth 5; nothing in a table is deeper than that.
MAX_DEPTH = 8

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NODES = (yaml.ScalarEvent, yaml.SequenceStartEvent, yaml.MappingStartEvent)
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
        return _document(yaml.parse(text, Loader=_LOADER))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
        place = f"line {mark.line + 1}" if mark else "YAML"
        raise TableError(place, f"{problem}; export the table again") from error


def _document(events: Iterator[yaml.Event]) -> Value:
    next(events)  # stream start
    if not isinstance(next(events), yaml.DocumentStartEvent):
        raise TableError("line 1", "empty; export the table again")
    value = _value(next(events), events, 1)
    next(events)  # document end
    if not isinstance(more := next(events), yaml.StreamEndEvent):
        raise _error(more, "a second document; a table is one document")
    return value


def _value(event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Value:
    if not isinstance(event, _NODES) or event.anchor is not None:
        raise _error(event, "an anchor or alias; write the value out")
    if event.tag is not None:
        raise _error(event, f"a tag {show(event.tag)}; tables have none")
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event)
    if depth > MAX_DEPTH:
        raise _error(event, f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Value] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_value(event, events, depth + 1))
        return items
    mapping: dict[str, Value] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _key(event)
        if key in mapping:
            raise _error(event, f"key {show(key)} appears twice; keep one")
        mapping[key] = _value(next(events), events, depth + 1)
    return mapping


def _key(event: yaml.Event) -> str:
    if not isinstance(event, yaml.ScalarEvent) or event.anchor is not None or event.tag is not None:
        raise _error(event, "a key that is not a plain word or a quoted string")
    text: str = event.value
    if event.style in ("'", '"') or _PLAIN_KEY.fullmatch(text):
        return text
    raise _error(event, f"key {show(text)} must be quoted")


def _scalar(event: yaml.ScalarEvent) -> Value:
    text: str = event.value
    if event.style in ("'", '"'):
        return text
    if event.style:
        raise _error(event, "a block scalar; use a quoted string")
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    raise _error(event, f"{show(text)} is not a number, true, false or null; quote strings")


def _error(event: yaml.Event, problem: str) -> TableError:
    mark = event.start_mark
    return TableError(f"line {mark.line + 1}" if mark else "YAML", problem)
