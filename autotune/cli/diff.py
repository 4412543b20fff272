"""``autotune diff``: which answers two tables give differently, and what else differs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.exits import Exit
from autotune.cli.options import Json


def command(
    old: Annotated[Path, typer.Argument(metavar="A", help="A routing table.")],
    new: Annotated[Path, typer.Argument(metavar="B", help="Another one: a later run, version or engine.")],
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit 1 if anything differs, as git diff does.")
    ] = False,
    json: Json = False,
) -> int:
    """Say how table B differs from table A: facts, policy and routes first, then the letters.

    Letters are compared by what they mean; runs of equal changes are one line, and --json has every place.
    Times and ratios alone are no difference. Needs no GPU.
    """
    from autotune.cli.output import print_json, print_text
    from autotune.report.difference import difference_json, difference_text
    from autotune.table.diff import compare
    from autotune.table.load import load_table

    first, second = load_table(old), load_table(new)
    found = compare(first, second)
    if json:
        print_json(difference_json(first, second, found))
    else:
        print_text(difference_text(first, second, (old, new), found))
    return int(Exit.FAILED if exit_code and not found.same else Exit.DONE)
