"""One prebuild a folder: two would write each other's manifest."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from autotune.prebuild.errors import PrebuildError


@contextlib.contextmanager
def alone(work: Path) -> Iterator[None]:
    """Hold ``work``, where objects are built. The kernel lets go of it when the process ends.

    Raises:
        PrebuildError: another process has it, or it cannot be made.
    """
    try:
        work.mkdir(parents=True, exist_ok=True)
        handle = os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise PrebuildError(f"{work} cannot be written: {error.strerror or error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise PrebuildError(
            f"{work} is in use by another prebuild; wait for it to end, or give another folder"
        ) from error
    try:
        yield
    finally:
        os.close(handle)
