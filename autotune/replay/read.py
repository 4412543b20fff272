"""From a file to a recording: a study's database or a thinned one, plain or packed with xz.

The file is copied first and never written: not its write-ahead log, not by a migration.
"""

from __future__ import annotations

import contextlib
import lzma
import math
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.bench.eprocess import SignTest, Unit
from autotune.replay import study_file, thinned_file
from autotune.replay.errors import RecordingError
from autotune.store.errors import StoreError, one_line
from autotune.store.snapshot import snapshot
from autotune.tuner.objectives import Objectives

if TYPE_CHECKING:
    from autotune.replay.recording import Recording
    from autotune.replay.study_file import Choose

SQLITE = b"SQLite format 3\x00"
XZ = b"\xfd7zXZ\x00"


def read_recording(path: Path, choose: Choose) -> Recording:
    """The recorded study that ``choose`` takes from (study, ids of its cells).

    Raises:
        RecordingError: there is no such file, it is no recording, it is cut off or damaged; and whatever
            ``choose`` raises.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(len(SQLITE))
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}; name a recorded study's file") from None
    with tempfile.TemporaryDirectory(prefix="autotune-replay-") as folder:
        copy = Path(folder) / "recording.db"
        try:
            if head.startswith(XZ):
                _unpack(path, copy)
            elif head == SQLITE:
                snapshot(path, copy)
            else:
                raise RecordingError(
                    f"{path}: is neither an SQLite database nor one packed with xz; name the database of a "
                    "run, or what scripts/thin_evidence.py wrote"
                )
            return _sound(_read(copy, str(path), choose))
        except (sqlite3.Error, StoreError) as error:
            said = one_line(error).replace(str(copy), str(path))
            where = "" if said.startswith(str(path)) else f"{path}: "
            raise RecordingError(f"{where}{said}; is it a whole copy of a recorded study?") from None


def _read(copy: Path, where: str, choose: Choose) -> Recording:
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != ("ok",):
            raise RecordingError(f"{where}: is damaged or cut off ({found[0]}); copy it again")
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        tables = {name for (name,) in connection.execute(query)}
    if thinned_file.TABLE in tables:
        return thinned_file.read_thinned(copy, where, choose)
    return study_file.read_study(copy, where, choose)


def _sound(recording: Recording) -> Recording:
    """``recording``, if a study can be what it says it is, and its seconds are some.

    Raises:
        RecordingError: otherwise.
    """
    study = recording.study
    try:
        SignTest(study.margin, study.multiplicity, unit=Unit(study.unit))
        Objectives(study.objectives, ())
        chunks = [chunk for timing in recording.timings.values() for chunk in timing.chunks]
        wrong: list[object] = [size for size, _ in chunks if type(size) is not int or size < 1]
        times = [*(seconds for _, seconds in chunks), *(check.seconds for check in recording.checks)]
        wrong += [seconds for seconds in times if not 0.0 <= seconds < math.inf]
        if wrong:
            raise ValueError(f"{wrong[0]!r} rounds or seconds")
    except (TypeError, ValueError) as error:
        raise RecordingError(
            f"{recording.where}: its study cannot be ({one_line(error)}); make the file again"
        ) from None
    return recording


def _unpack(path: Path, copy: Path) -> None:
    try:
        with lzma.open(path) as packed, copy.open("wb") as stream:
            shutil.copyfileobj(packed, stream, 1 << 20)
    except (lzma.LZMAError, EOFError) as error:
        raise RecordingError(f"{path}: is damaged or cut off ({one_line(error)}); copy it again") from None
    except OSError as error:
        raise RecordingError(f"{path}: cannot be unpacked: {error.strerror or error}") from None
    with copy.open("rb") as stream:
        if stream.read(len(SQLITE)) != SQLITE:
            raise RecordingError(f"{path}: holds no SQLite database; name a recorded study's file")
