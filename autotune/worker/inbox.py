"""What a child says, read without ever waiting for it.

``Connection.recv`` waits for the rest of a message that has begun: a child that stops in the middle of one
would take its parent along. Here bytes are collected as they come, and a message is had once it is whole.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from autotune.worker.base import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

# multiprocessing.connection's frames: an int32 length, or -1 and a uint64.
_SHORT = struct.Struct("!i")
_LONG = struct.Struct("!Q")
_READ_BYTES = 1 << 20
# A report is a few KiB. A length that is no length (a stray write) must not be waited or allocated for.
MOST_BYTES = 1 << 30


class Inbox:
    """Frames that arrive on a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()

    @property
    def pending(self) -> bool:
        """There are bytes that no message has been made of."""
        return bool(self._buffer)

    def fill(self) -> bool:
        """Take what is there; call it when the descriptor is readable.

        Returns:
            False at the end of file, or if the other side is gone.
        """
        try:
            data = os.read(self._fd, _READ_BYTES)
        except OSError:
            return False
        self._buffer += data
        return bool(data)

    def messages(self) -> Iterator[bytes]:
        """The whole messages, each taken out as it is yielded.

        Raises:
            ProtocolError: a length that no message has.
        """
        while (bounds := self._first()) is not None:
            start, end = bounds
            message = bytes(memoryview(self._buffer)[start:end])
            del self._buffer[:end]
            yield message

    def _first(self) -> tuple[int, int] | None:
        """Where the first message's contents lie, if it is whole."""
        if len(self._buffer) < _SHORT.size:
            return None
        start = _SHORT.size
        (size,) = _SHORT.unpack_from(self._buffer)
        if size == -1:
            start += _LONG.size
            if len(self._buffer) < start:
                return None
            (size,) = _LONG.unpack_from(self._buffer, _SHORT.size)
        if not 0 <= size <= MOST_BYTES:
            raise ProtocolError(f"a message of {size} bytes")
        return (start, start + size) if len(self._buffer) >= start + size else None
