"""Detached Ed25519 signatures: who made a table, where the digest only says that it is whole.

``TABLE.sig`` holds one line, ``ed25519:`` and the signature of all bytes of the table in base64. A process
whose environment has ``AUTOTUNE_PUBKEY`` uses no table without one; the variable holds the path of a public
key in PEM, or the 32 bytes of one in base64. Needs the package ``cryptography`` (the extra ``sign``), which
nothing else imports. Every way in which a signature cannot be checked is a refusal.
"""

from __future__ import annotations

import base64
import os
import re
from typing import TYPE_CHECKING

from autotune.table.errors import TableError, show
from autotune.table.source import PUBLIC_KEY_VARIABLE, read_regular, signature_path

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_LINE = re.compile(rb"ed25519:([A-Za-z0-9+/]{86}==)\n?")
_RAW_KEY = re.compile(r"[A-Za-z0-9+/]{43}=")
_MOST_BYTES = 16 * 1024

# Where a relative path led when it first gave a key: the process may go to another folder before a reload.
_FOUND: dict[str, str] = {}


def demand_signature(data: bytes, path: str | os.PathLike[str]) -> None:
    """Pass silently if ``path`` has a signature of ``data`` by the key in ``AUTOTUNE_PUBKEY``.

    Raises:
        TableError: no signature, a wrong one, no usable key, or no ``cryptography`` to check it with.
    """
    key = public_key(os.environ.get(PUBLIC_KEY_VARIABLE, ""))
    beside = signature_path(path)
    assert beside is not None
    try:
        line = _LINE.fullmatch(read_regular(beside, _MOST_BYTES))
    except TableError as error:
        remedy = "autotune sign TABLE --key FILE makes one"
        raise TableError(
            "signature", f"{PUBLIC_KEY_VARIABLE} is set, and {beside} {error.problem}; {remedy}"
        ) from error
    if line is None:
        raise TableError(
            "signature", f"{beside} is not a signature; autotune sign TABLE --key FILE makes one"
        )
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(base64.b64decode(line[1]), data)
    except InvalidSignature as error:
        raise TableError(
            "signature",
            f"{beside} does not fit this table and {PUBLIC_KEY_VARIABLE}; sign it again, or check the key",
        ) from error


def signature_line(data: bytes, key: Ed25519PrivateKey) -> bytes:
    """What ``TABLE.sig`` holds for a table of these bytes."""
    return b"ed25519:" + base64.b64encode(key.sign(data)) + b"\n"


def public_key(text: str) -> Ed25519PublicKey:
    """The key that the variable names.

    Raises:
        TableError: it names none, or ``cryptography`` is missing.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise TableError("signature", f"{error}; pip install 'kernel-autotune[sign]'") from error
    problem = f"{PUBLIC_KEY_VARIABLE} {show(text)}"
    try:
        if _RAW_KEY.fullmatch(text):
            return Ed25519PublicKey.from_public_bytes(base64.b64decode(text))
        path = _FOUND.get(text) or os.path.abspath(text)  # noqa: PTH100 - as in source
        key = load_pem_public_key(read_regular(path, _MOST_BYTES))
    except TableError as error:
        raise TableError(
            "signature", f"{problem} {error.problem}; it is a PEM file or 32 bytes in base64"
        ) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TableError("signature", f"{problem} holds no public key in PEM ({error})") from error
    if not isinstance(key, Ed25519PublicKey):
        raise TableError("signature", f"{problem} holds a {type(key).__name__}, not an Ed25519 key")
    _FOUND[text] = path
    return key


def private_key(path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """The unencrypted Ed25519 key in a PEM file (``openssl genpkey -algorithm ed25519 -out FILE``).

    Raises:
        TableError: the file holds none, or ``cryptography`` is missing.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise TableError("signature", f"{error}; pip install 'kernel-autotune[sign]'") from error
    remedy = "openssl genpkey -algorithm ed25519 -out FILE makes one"
    try:
        key = load_pem_private_key(read_regular(path, _MOST_BYTES), password=None)
    except TableError as error:
        raise TableError(os.fspath(path), f"{error.problem}; {remedy}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise TableError(
            os.fspath(path), f"holds no private key in PEM without a password; {remedy}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise TableError(os.fspath(path), f"holds a {type(key).__name__}, not an Ed25519 key; {remedy}")
    return key


def public_text(key: Ed25519PrivateKey) -> str:
    """Its public half as ``AUTOTUNE_PUBKEY`` takes it: 32 bytes in base64."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return base64.b64encode(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()
