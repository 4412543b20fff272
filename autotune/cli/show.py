"""``autotune show``: a table as a coloured grid of letters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import Json


def command(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A routing table.")], json: Json = False
) -> int:
    """Print a table: one letter a cell, batch sizes across, KV lengths down. Needs no GPU."""
    from autotune.cli.output import print_json, print_text
    from autotune.report.grid import table_json, table_text
    from autotune.table.load import load_table

    loaded = load_table(table)
    if json:
        print_json(table_json(loaded))
    else:
        print_text(table_text(loaded))
    return 0
