"""``load_table``: a table that loads is whole, unchanged and consistent.

The order matters: file kind and size, the signature where one is demanded, digest, UTF-8, a strict YAML
subset, keys and types, then every relation between them. Standard library and PyYAML only; a serving process
imports this. (A deployment that sets ``AUTOTUNE_PUBKEY`` also needs ``cryptography``.)
"""

from __future__ import annotations

import os

from autotune.table.errors import TableError
from autotune.table.model import RoutingTable
from autotune.table.parse import table_from
from autotune.table.source import PUBLIC_KEY_VARIABLE, open_signed, read_regular
from autotune.table.validate import validate

__all__ = ["TableError", "load_table"]


def load_table(source: str | os.PathLike[str] | bytes) -> RoutingTable:
    """The table in a file, or in bytes that were read already (and whose signature was the reader's affair).

    Raises:
        TableError: anything wrong with it, in one line: file, place, problem, remedy.
    """
    # Here: PyYAML is a quarter of what importing the router would cost, and only loading needs it.
    from autotune.table.strict_yaml import parse

    file = "<bytes>" if isinstance(source, bytes) else os.fspath(source)
    try:
        data = source if isinstance(source, bytes) else _read(source)
        text, digest = open_signed(data)
        table = table_from(parse(text), digest)
        validate(table)
    except TableError as error:
        raise error.within(file) from error.__cause__
    return table


def _read(path: str | os.PathLike[str]) -> bytes:
    data = read_regular(path)
    if PUBLIC_KEY_VARIABLE in os.environ:
        from autotune.table.signature import demand_signature

        demand_signature(data, path)
    return data
