"""``autotune sign``: a detached signature beside a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.exits import Exit
from autotune.cli.options import Json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def command(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A routing table.")],
    key: Annotated[
        Path,
        typer.Option(
            "--key", metavar="FILE", help="Ed25519 key in PEM: openssl genpkey -algorithm ed25519 -out FILE."
        ),
    ],
    json: Json = False,
) -> int:
    """Write TABLE.sig, and print what AUTOTUNE_PUBKEY must be where only signed tables are used.

    Needs the package cryptography: pip install 'kernel-autotune[sign]'.
    """
    from autotune.cli.output import print_json, print_text
    from autotune.table.signature import private_key, public_text

    signing = private_key(key)
    path = write_signature(table, signing)
    public = public_text(signing)
    if json:
        print_json({"signature": str(path), "public_key": public})
    else:
        print_text(f"{path}\nAUTOTUNE_PUBKEY={public}")
    return int(Exit.DONE)


def write_signature(table: Path, key: Ed25519PrivateKey) -> Path:
    """Sign the table as it lies there.

    Raises:
        TableError: it is not a sound table: nothing else is worth a signature.
        TableWriteError: the folder cannot be written.
    """
    from autotune.table.dump import write_bytes
    from autotune.table.errors import TableError
    from autotune.table.load import load_table
    from autotune.table.signature import signature_line
    from autotune.table.source import read_regular, signature_path

    try:
        data = read_regular(table)
        load_table(data)
    except TableError as error:
        raise TableError(str(table), str(error)) from error
    path = Path(signature_path(table) or "")
    write_bytes(signature_line(data, key), path)
    return path
