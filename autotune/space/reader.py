"""Strict reading of a YAML file: every fault is one line with file, line, key and what is allowed.

A file is a mapping; a :class:`Section` is one mapping of it that knows where it stands. Its readers check
type and range and raise :class:`SpaceError`; ``Section.only`` refuses keys that no one reads.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from autotune.space.errors import SpaceError

_DEPTH = 16  # deeper than any file of ours: an alias that contains itself

_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}


def suggest(value: str, allowed: Iterable[str]) -> str:
    """``, did you mean 'q_len'?`` or nothing."""
    near = difflib.get_close_matches(value, list(allowed), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def listed(values: Iterable[object]) -> str:
    """``a, b, c`` for messages."""
    return ", ".join(str(value) for value in values)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class Section:
    """One mapping of a file.

    Attributes:
        file: the file's path as the user gave it.
        path: keys from the top, ``models[0].``; "" at the top.
    """

    def __init__(self, file: Path, path: str, line: int, data: dict[str, Any], lines: dict[str, int]) -> None:
        self.file = file
        self.path = path
        self.line = line
        self._data = data
        self._lines = lines

    def fail(self, key: str, message: str) -> NoReturn:
        """Raise for ``key``: ``FILE line N: KEY: MESSAGE``."""
        line = self._lines.get(key.split("[", 1)[0], self.line)
        where = f"{self.path}.{key}" if self.path and key else self.path or key
        raise SpaceError(f"{self.file} line {line}: {f'{where}: ' if where else ''}{message}")

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def keys(self) -> list[str]:
        """Keys in file order."""
        return list(self._data)

    def only(self, allowed: Sequence[str]) -> None:
        """Refuse every key that is not in ``allowed``."""
        for key in self._data:
            if key not in allowed:
                self.fail(key, f"unknown key{suggest(key, allowed)}; allowed: {listed(allowed)}")

    def _value(self, key: str, wanted: str) -> Any:
        if key not in self._data:
            where = f"{self.path}.{key}" if self.path else key
            raise SpaceError(f"{self.file} line {self.line}: {where}: missing; it must be {wanted}")
        return self._data[key]

    def schema(self, tag: str) -> None:
        """The file's ``schema`` must be exactly ``tag``."""
        value = self._value("schema", f'"{tag}"')
        if value != tag:
            self.fail("schema", f'must be "{tag}", not {_show(value)}')

    def text(self, key: str, allowed: Iterable[str] | None = None, *, example: str = "") -> str:
        """A string, one of ``allowed`` if given."""
        options = None if allowed is None else list(allowed)
        wanted = f"one of {listed(options)}" if options is not None else f"a string{example}"
        value = self._value(key, wanted)
        self._check_text(key, value, options, wanted)
        return str(value)

    def _check_text(self, key: str, value: object, options: list[str] | None, wanted: str) -> None:
        if not isinstance(value, str) or not value:
            quote = "; quote it" if isinstance(value, (int, float, bool)) else ""
            self.fail(key, f"must be {wanted}, not {_show(value)}{quote}")
        if options is not None and value not in options:
            self.fail(key, f"must be {wanted}, not {_show(value)}{suggest(value, options)}")

    def integer(self, key: str, *, least: int = 1) -> int:
        """An integer of at least ``least``."""
        wanted = f"an integer >= {least}"
        value = self._value(key, wanted)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.fail(key, f"must be {wanted}, not {_show(value)}")
        return value

    def number(self, key: str, *, least: float = 0.0) -> float:
        """A finite number of at least ``least``."""
        wanted = f"a number >= {least:g}"
        value = self._value(key, wanted)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.fail(key, f"must be {wanted}, not {_show(value)}")
        if not least <= value < float("inf"):
            self.fail(key, f"must be {wanted}, not {_show(value)}")
        return float(value)

    def boolean(self, key: str) -> bool:
        """``true`` or ``false``."""
        value = self._value(key, "true or false")
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, not {_show(value)}")
        return value

    def _items(self, key: str, wanted: str) -> list[Any]:
        value = self._value(key, wanted)
        if not isinstance(value, list) or not value:
            self.fail(key, f"must be {wanted}, not {_show(value)}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A non-empty, strictly ascending list of positive integers."""
        wanted = "an ascending list of positive integers"
        items = self._items(key, wanted)
        for index, item in enumerate(items):
            if not isinstance(item, int) or isinstance(item, bool) or item < 1:
                self.fail(f"{key}[{index}]", f"must be a positive integer, not {_show(item)}")
            if index and item == items[index - 1]:
                self.fail(f"{key}[{index}]", f"{item} is there twice")
            if index and item < items[index - 1]:
                self.fail(f"{key}[{index}]", f"must ascend, and {item} follows {items[index - 1]}")
        return tuple(items)

    def texts(self, key: str, allowed: Iterable[str] | None = None) -> tuple[str, ...]:
        """A non-empty list of distinct strings, each one of ``allowed`` if given."""
        options = None if allowed is None else list(allowed)
        wanted = "a list of strings" if options is None else f"a list of {listed(options)}"
        each = "a string" if options is None else f"one of {listed(options)}"
        items = self._items(key, wanted)
        for index, item in enumerate(items):
            self._check_text(f"{key}[{index}]", item, options, each)
            if item in items[:index]:
                self.fail(f"{key}[{index}]", f"{item!r} is there twice")
        return tuple(items)

    def pairs(self, key: str) -> tuple[tuple[int, int], ...]:
        """A list (may be empty) of ``[low, high]`` with ``1 <= low <= high``, ascending, without overlap."""
        wanted = "a list of [low, high] pairs"
        value = self._value(key, wanted)
        if not isinstance(value, list):
            self.fail(key, f"must be {wanted}, not {_show(value)}")
        found: list[tuple[int, int]] = []
        for index, item in enumerate(value):
            where = f"{key}[{index}]"
            whole = isinstance(item, list) and len(item) == 2
            if not whole or not all(isinstance(end, int) and not isinstance(end, bool) for end in item):
                self.fail(where, f"must be two integers [low, high], not {_show(item)}")
            low, high = item
            if not 1 <= low <= high:
                self.fail(where, f"must have 1 <= low <= high, not {_show(item)}")
            if found and (low < found[-1][1] or (low, high) == found[-1]):
                self.fail(where, f"{_show(item)} overlaps {list(found[-1])}")
            found.append((low, high))
        return tuple(found)

    def section(self, key: str) -> Section:
        """A mapping inside this one."""
        value = self._value(key, "a mapping")
        if not isinstance(value, _Mapping):
            self.fail(key, f"must be a mapping, not {_show(value)}")
        return value.section(self.file, f"{self.path}.{key}" if self.path else key)

    def sections(self, key: str, wanted: str) -> list[Section]:
        """A non-empty list of mappings."""
        found = []
        for index, item in enumerate(self._items(key, wanted)):
            where = f"{key}[{index}]"
            if not isinstance(item, _Mapping):
                self.fail(where, f"must be a mapping, not {_show(item)}")
            found.append(item.section(self.file, f"{self.path}.{where}" if self.path else where))
        return found


class _Mapping(dict[str, Any]):
    """A mapping that remembers the line of itself and of each key."""

    line: int
    lines: dict[str, int]

    def section(self, file: Path, path: str) -> Section:
        return Section(file, path, self.line, self, self.lines)


def _construct(
    node: yaml.Node, scalar: Callable[[yaml.Node], Any], fail: Callable[[int, str], NoReturn], depth: int = 0
) -> Any:
    line = node.start_mark.line + 1
    if depth > _DEPTH:
        fail(line, f"nested more than {_DEPTH} deep")
    if isinstance(node, yaml.MappingNode):
        found = _Mapping()
        found.line, found.lines = line, {}
        for key_node, value_node in node.value:
            at = key_node.start_mark.line + 1
            key = scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                fail(at, f"a key must be a string, not {_show(key_node.value)}")
            if key in found:
                fail(at, f"{key}: is there twice, first in line {found.lines[key]}")
            found.lines[key] = at
            found[key] = _construct(value_node, scalar, fail, depth + 1)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, scalar, fail, depth + 1) for item in node.value]
    return scalar(node)


def read(path: Path) -> Section:
    """Read a YAML file whose top is a mapping.

    Raises:
        SpaceError: it cannot be read, is no UTF-8, no YAML, no mapping, or has a key twice.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SpaceError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpaceError(f"{path}: not UTF-8 text (byte {error.start})") from error

    def fail(line: int, message: str) -> NoReturn:
        raise SpaceError(f"{path} line {line}: {message}")

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        data = None if node is None else _construct(node, loader.construct_object, fail)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        here = text.splitlines()[line - 1 : line]
        tab = "; indent with spaces, not tabs" if here and "\t" in here[0] else ""
        raise SpaceError(f"{path} line {line}: not YAML: {error.problem or error.context}{tab}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, SpaceError):
            raise
        raise SpaceError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, _Mapping):
        raise SpaceError(f"{path}: must be a mapping of keys to values, not {_show(data)}")
    return data.section(path, "")
