"""What tells one content of a file from the next without reading it."""

from __future__ import annotations

import os
from time import time_ns
from typing import NamedTuple

# A second write within one tick of the file system's clock leaves no trace in the times (a tick is 4 ms on
# ext4, 2 s on FAT): a file that changed this recently is looked at again.
_RACY_NS = 2_000_000_000

_Stat = tuple[int, ...]


class FileMark(NamedTuple):
    """A file's identity, size and times, its signature's too; ``settled`` if equal marks mean equal bytes."""

    stats: tuple[_Stat | None, ...]
    settled: bool

    @classmethod
    def of(cls, *paths: object) -> FileMark:
        """Follows symbolic links, as Kubernetes swaps them. A file that is not there is a mark too."""
        stats, settled = [], True
        for path in paths:
            found = _stat(path)
            stats.append(found)
            settled = settled and (found is None or not 0 <= time_ns() - max(found[-2:]) < _RACY_NS)
        return cls(tuple(stats), settled)


def _stat(path: object) -> _Stat | None:
    try:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        found = os.stat(path)  # noqa: PTH116 - pathlib would cost a serving process its import
    except Exception:  # gone, no permission, no usable path, or a foreign class
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
