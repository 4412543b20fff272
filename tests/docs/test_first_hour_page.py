"""docs/first-hour-on-a-b200.md quotes what is printed today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.console import cli

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "first-hour-on-a-b200.md").read_text()


def test_the_quoted_lines_are_among_those_that_explain_prints() -> None:
    quoted = re.search(r"`(autotune explain [^`]+--facts table)`:\n\n```\n(.*?)```", TEXT, re.DOTALL)
    assert quoted
    words = shlex.split(quoted[1])[1:]
    done = cli(*(ROOT / word if word.endswith(".yaml") else word for word in words))
    assert done.code == 0, done.err
    lines = quoted[2].splitlines()
    assert len(lines) == 4
    assert not [line for line in lines if line not in done.out.splitlines()]
