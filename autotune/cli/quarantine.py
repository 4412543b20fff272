"""``autotune quarantine``: withdraw a route from a table that is in use, with a reason and a name."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autotune.table.model import RoutingTable
    from autotune.table.withdraw import Withdrawal


def command(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A routing table; it is rewritten.")],
    route: Annotated[str, typer.Option("--route", metavar="NAME", help="The route to withdraw.")],
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="What happened; it stays in the table.")],
    heads: Annotated[
        str | None,
        typer.Option("--heads", metavar="Q/KV/DIM", help="Only these per-rank heads, such as 8/1/128."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="PROFILE", help="Only this one: fp32, bf16, fp8 or nvfp4 (KV cache)."
        ),
    ] = None,
    q_len: Annotated[
        str | None, typer.Option("--q-len", metavar="N,...", help="Only these accept lengths.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option("--batch", metavar="N,...", help="Only these batch sizes, and intervals around them."),
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="NAME", help="Who signs it off; the login name if left out.")
    ] = None,
    db: Annotated[
        str | None,
        typer.Option("--db", metavar="URL", help="Also note it in this database, so that export keeps it."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="Sign the rewritten table with this Ed25519 key (PEM)."),
    ] = None,
    json: Json = False,
) -> int:
    """Withdraw a route: its letters become q, at once and in every later export of --db.

    A router that watches the file takes it up by itself; what a CUDA graph has captured stays until it is
    captured again. Exit 2 if the table has no such route, heads, q_len or batch size.
    """
    from datetime import datetime, timezone

    from autotune.cli.context import require_database
    from autotune.cli.output import note, print_json, print_text
    from autotune.table.diff import diff_tables
    from autotune.table.load import load_table
    from autotune.table.source import signature_path

    asked = _asked(route, heads, dtype, q_len, batch)
    if not why.strip():
        raise CliError("--why: say what happened; the reason stays in the table", Exit.USAGE)
    if db is not None:
        require_database(db)
    signing = None
    if key is not None:
        from autotune.table.signature import private_key

        signing = private_key(key)
    name = (by or _login()).strip()
    reason = f"{' '.join(why.split())} (signed off by {name})"
    # Bytes that are not UTF-8 arrive as lone surrogates, which neither a table, a database nor stdout takes.
    reason = reason.encode("utf-8", "backslashreplace").decode("utf-8")
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    with _alone(table):
        loaded = load_table(table)
        data, withdrawn, items = _withdrawn(table, loaded, asked, reason, now)
        noted = _note(db, asked, loaded, reason) if db is not None else 0
        _write(data, table, noted)
        digest = withdrawn.digest
        signature = signature_path(table)
        assert signature is not None
        if signing is not None:
            from autotune.cli.sign import write_signature

            write_signature(table, signing)
        elif Path(signature).exists():
            note(
                f"{signature} no longer fits, and routers that demand it keep the old table: "
                f"autotune sign {table} --key FILE"
            )
    changed = [change for change in diff_tables(loaded, withdrawn) if change.kv_high is not None]
    if json:
        print_json(
            {
                "table": str(table),
                "digest": digest,
                "before": loaded.digest,
                "reason": reason,
                "entries": items,
                "cells": len(changed),
                "columns_noted": noted,
            }
        )
    else:
        text = f"{table}: {route} withdrawn in {len(changed)} cells; {loaded.digest[:19]} -> {digest[:19]}"
        print_text(text + (f"; {noted} columns noted in the database" if db is not None else ""))
    return int(Exit.DONE)


@contextmanager
def _alone(table: Path) -> Iterator[None]:
    """Wait for other runs on this table: of two that read the same one, the later write would win.

    The lock is on the folder, which holds no lock file then; it ends with the process. Where a file system
    has no such lock, runs are not kept apart.
    """
    import fcntl

    folder = None
    try:
        with suppress(OSError):  # a folder that is not there: reading the table says so
            folder = os.open(
                Path(os.path.realpath(table)).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        if folder is not None:
            os.close(folder)


def _withdrawn(
    path: Path, loaded: RoutingTable, asked: Withdrawal, reason: str, at: str
) -> tuple[bytes, RoutingTable, int]:
    """The new table's bytes, what a router will read in them, and how many items were added.

    Raises:
        TableError: as ``Withdrawal.entries``; or the new table would not load. Before anything is written
            or noted: a table that is not there withdraws nothing.
    """
    from autotune.table.dump import dump_table
    from autotune.table.errors import TableError
    from autotune.table.load import load_table
    from autotune.table.withdraw import withdraw

    try:
        items = asked.items(loaded, reason, at)
        data = dump_table(withdraw(loaded, items))
        return data, load_table(data), len(items)
    except TableError as error:
        raise error.within(str(path)) from error


def _write(data: bytes, table: Path, noted: int) -> None:
    from autotune.table.dump import write_bytes
    from autotune.table.errors import TableWriteError

    try:
        write_bytes(data, table)
    except TableWriteError as error:
        if not noted:
            raise
        stayed = f"{noted} columns stay noted in the database, for later exports; the table is as it was"
        raise TableWriteError(f"{error}; {stayed}: run the same command again") from error


def _asked(
    route: str, heads: str | None, dtype: str | None, q_len: str | None, batch: str | None
) -> Withdrawal:
    from autotune.domain.dtypes import PROFILES
    from autotune.table.withdraw import Withdrawal

    wanted = None
    if heads is not None:
        parts = heads.split("/")
        if len(parts) != 3 or not all(_is_count(part) for part in parts):
            raise CliError(f"--heads {heads}: must be query/KV/head_dim, such as 8/1/128", Exit.USAGE)
        wanted = (int(parts[0]), int(parts[1]), int(parts[2]))
    if dtype is not None and dtype not in PROFILES:
        raise CliError(f"--dtype {dtype}: there are {', '.join(PROFILES)}", Exit.USAGE)
    return Withdrawal(route, wanted, dtype, _counts("--q-len", q_len), _counts("--batch", batch))


def _counts(flag: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(_is_count(part) for part in parts):
        raise CliError(f"{flag} {text}: must be positive integers, separated by commas", Exit.USAGE)
    return tuple(sorted({int(part) for part in parts}))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0


def _login() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError) as error:  # a container's user may have no name
        raise CliError("--by NAME: this login has no name; say who signs it off", Exit.USAGE) from error


def _note(url: str, asked: Withdrawal, table: RoutingTable, reason: str) -> int:
    from autotune.store.database import open_database
    from autotune.store.repository import Repository

    with open_database(url) as database:
        repository = Repository(database)
        fingerprint = repository.register_fingerprint(table.facts)
        columns = list(asked.columns(table))
        for column in columns:
            repository.add_quarantine(fingerprint, column, asked.route, reason)
    return len(columns)
