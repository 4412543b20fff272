"""From a path to trusted bytes: a regular file, of sane size, UTF-8, whose digest is right.

The last line is ``digest: "sha256:<64 hex digits>"`` over all bytes before it. It is checked before
anything is parsed: a truncated, edited or re-encoded file never reaches the YAML parser.
"""

from __future__ import annotations

import os
import re
import stat

from autotune.table.errors import TableError

# A table of 10,000 cells with its speed-ups is about half a MiB.
MAX_BYTES = 8 * 1024 * 1024

# Set: a table is used only with a valid signature beside it (``autotune.table.signature``).
PUBLIC_KEY_VARIABLE = "AUTOTUNE_PUBKEY"

_DIGEST_LINE = re.compile(rb'digest: "(sha256:[0-9a-f]{64})"\n')
_DIGEST_LENGTH = len('digest: "sha256:"\n') + 64


def read_regular(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> bytes:
    """All bytes of a regular file (a symbolic link to one will do).

    Raises:
        TableError: missing, unreadable, a folder, FIFO or device, or larger than ``limit`` bytes.
    """
    try:
        # Looked at before it is opened (opening a device can act on it) and again after, by descriptor;
        # O_NONBLOCK keeps a FIFO that was swapped in between from blocking the server's start.
        found = os.stat(path)  # noqa: PTH116 - pathlib would cost a serving process its import
        if stat.S_ISREG(found.st_mode):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb", buffering=0) as file:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode):
                    chunks, left = [], limit + 1
                    while left > 0 and (chunk := file.read(left)):
                        chunks.append(chunk)
                        left -= len(chunk)
                    if left > 0:
                        return b"".join(chunks)
                    raise TableError("", f"larger than the limit of {limit} bytes; this is not a table")
        raise TableError("", "not a regular file; give the path of a table")
    except OSError as error:
        raise TableError("", f"cannot be read ({error.strerror or error}); check the path") from error
    except ValueError as error:
        if isinstance(error, TableError):
            raise
        raise TableError("", f"is not a usable path ({error})") from error


def signature_path(path: object) -> str | None:
    """Where the detached signature of a table lies: ``TABLE.sig``; None for what is no path."""
    try:
        return f"{os.fsdecode(path)}.sig"  # type: ignore[arg-type]
    except Exception:  # a foreign class may do anything
        return None


def sign(body: bytes) -> bytes:
    """``body`` with its digest line."""
    return body + f'digest: "{digest_of(body)}"\n'.encode()


def digest_of(body: bytes) -> str:
    """``sha256:`` and the hex digest of a table's bytes before the digest line."""
    import hashlib  # loads OpenSSL: only where a table is read

    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def open_signed(data: bytes) -> tuple[str, str]:
    """The text before the digest line, and the digest.

    Raises:
        TableError: too large, no digest line, a wrong digest, or not UTF-8.
    """
    if len(data) > MAX_BYTES:
        raise TableError("", f"larger than the limit of {MAX_BYTES} bytes; this is not a table")
    line = _DIGEST_LINE.fullmatch(data[-_DIGEST_LENGTH:])
    body = data[:-_DIGEST_LENGTH]
    if line is None or (body and not body.endswith(b"\n")):
        raise TableError(
            "last line",
            'must be digest: "sha256:<64 hex digits>"; the file is truncated, edited or not a table: '
            "export it again",
        )
    claimed = line[1].decode()
    if digest_of(body) != claimed:
        raise TableError(
            "digest", "does not match the file's bytes; the file was changed after export: export it again"
        )
    try:
        return body.decode("utf-8"), claimed
    except UnicodeDecodeError as error:
        raise TableError(f"byte {error.start}", "not UTF-8; export the table again") from error
