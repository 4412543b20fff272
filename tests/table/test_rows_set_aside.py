"""Rows of numbers are read without YAML; what they mean must be what YAML says they mean."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.table.dump import dump_table
from autotune.table.errors import TableError
from autotune.table.strict_yaml import Value, parse, read, without_rows
from tests.table import samples

DATA = dump_table(samples.sample())
BODY = DATA[: DATA.rindex(b"digest: ")].decode()
ROW = '      "1024": [null, 1.1234, 1.1234, 1.1234]\n'
PIECES = [
    "\n",
    " ",
    '"',
    "'",
    "[",
    "]",
    "{",
    "}",
    ", ",
    ": ",
    "- ",
    "~0",
    "~",
    "#",
    "\r",
    "\u2028",
    "&a ",
    "*a",
]
PIECES += ["null", "1", "1.5", "-1", "1e9", ".inf", "~1", "|\n", "? ", "!!str ", ROW, ROW.strip(), "\n" + ROW]


def outcome(text: str, fast: bool) -> tuple[str, Value]:
    try:
        return "", parse(text) if fast else read(text)
    except TableError as error:
        return str(error), None


def test_most_of_a_table_is_set_aside() -> None:
    assert ROW in BODY
    found = without_rows(BODY)
    assert found is not None
    assert [None, 1.1234, 1.1234, 1.1234] in found[1]
    assert parse(BODY) == read(BODY) == read(*found)


@st.composite
def edited(draw: st.DrawFn) -> str:
    text = BODY
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        if draw(st.booleans()):  # beside a row, where the shortcut could go wrong
            rows = [index for index in range(len(text)) if text.startswith(": [", index)]
            start = draw(st.sampled_from(rows)) + draw(st.integers(-12, 40)) if rows else start
        start = max(0, start)
        text = text[:start] + draw(st.sampled_from(PIECES)) + text[start + draw(st.integers(0, 3)) :]
    return text


@given(edited())
@settings(max_examples=400, deadline=None)
def test_an_edited_table_reads_alike_both_ways(text: str) -> None:
    if "\t" not in text:
        assert outcome(text, fast=True) == outcome(text, fast=False)


@pytest.mark.parametrize(
    "text",
    [
        'a: "x\n  "1": [1, 2]\n',
        'a: "x\n\n  \\"1\\"\n  ends"\nb:\n  "1": [1, 2]\n',
        'a: \'x\n  "1": [1, 2]\n  y\'\nb:\n  "2": [1]\n',
        'a:\n  "1": [1, 2]\n  - x\n',
        'a:\n  "1": [1, 2]\n    more\n',
        'a:\n  "1": [1, 2] # comment\n',
        'a:\n  "1": [1, 2]\n  "1": [1, 2]\n',
        'a:\n  "1": [1.0e+999]\n',
        'a:\n  "1": [word]\n',
        'a: {\n  "1": [1]\n  , "2": [2]}\n',
        'a: ~0\nb:\n  "1": [1]\n',
        "a: ~\n",
        'a: "~0"\nb:\n  "1": [1, 2]\n',
        "".join(f'{" " * depth}"{depth}":\n' for depth in range(8)) + '        "9": [1]\n',
        "".join(f'{" " * depth}"{depth}":\n' for depth in range(7)) + '        "9": [1]\n',
    ],
)
def test_places_where_a_row_is_none(text: str) -> None:
    assert outcome(text, fast=True) == outcome(text, fast=False)


def test_a_row_inside_a_string_stays_in_the_string() -> None:
    text = 'a: \'x\n  "1": [1, 2]\n  y\'\n"b":\n  "2": [1.5]\n'
    assert parse(text) == {"a": 'x "1": [1, 2] y', "b": {"2": [1.5]}}
