"""``load_table``: a table that loads is whole, unchanged and consistent.

The order matters: file kind and size, digest, UTF-8, a strict YAML subset, keys and types, then every
relation between them. Standard library and PyYAML only; a serving process imports this.
"""

from __future__ import annotations

import os

from autotune.table.errors import TableError
from autotune.table.model import RoutingTable
from autotune.table.parse import table_from
from autotune.table.source import open_signed, read_regular
from autotune.table.validate import validate

__all__ = ["TableError", "load_table"]


def load_table(source: str | os.PathLike[str] | bytes) -> RoutingTable:
    """The table in a file, or in bytes that were read already.

    Raises:
        TableError: anything wrong with it, in one line: file, place, problem, remedy.
    """
    # Here: PyYAML is a quarter of what importing the router would cost, and only loading needs it.
    from autotune.table.strict_yaml import parse

    file = "<bytes>" if isinstance(source, bytes) else os.fspath(source)
    try:
        text, digest = open_signed(source if isinstance(source, bytes) else read_regular(source))
        table = table_from(parse(text), digest)
        validate(table)
    except TableError as error:
        raise error.within(file) from error.__cause__
    return table
