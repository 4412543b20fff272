"""Thin a study's database to what a replay needs: tens of megabytes become one or two.

    python scripts/thin_evidence.py IN OUT [--study ID]

IN is a study's database, plain or packed with xz (or a file that this script wrote); OUT is packed where its
name ends in .xz. Kept: the fingerprint, the study, its cells, every check's verdict, every round's times to
the last bit, the stored decisions, and how long each check and each chunk of rounds took
(autotune/replay/seconds.py).
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.replay.errors import RecordingError
from autotune.replay.read import read_recording
from autotune.replay.thinned_file import write_thinned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.store.records import Study


def main(given: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 with one line on stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", metavar="IN", type=Path)
    parser.add_argument("target", metavar="OUT", type=Path)
    parser.add_argument("--study", metavar="ID", help="needed where the database has several")
    options = parser.parse_args(given)

    def choose(offers: list[tuple[Study, frozenset[str]]]) -> Study:
        named = [study for study, _ in offers if options.study in (None, study.id)]
        if len(named) != 1:
            there = ", ".join(study.id for study, _ in offers) or "none"
            raise RecordingError(f"{options.source}: name one of its studies with --study: {there}")
        return named[0]

    try:
        recording = read_recording(options.source, choose)
        with tempfile.TemporaryDirectory(dir=options.target.parent, prefix=".thin-") as folder:
            plain = Path(folder) / "thin.db"
            write_thinned(recording, plain)
            if options.target.suffix == ".xz":
                packed = Path(folder) / "thin.db.xz"
                with (
                    plain.open("rb") as stream,
                    lzma.open(packed, "wb", preset=9 | lzma.PRESET_EXTREME) as out,
                ):
                    shutil.copyfileobj(stream, out)
                plain = packed
            plain.replace(options.target)
    except RecordingError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"{error.filename or options.target}: {error.strerror or error}\n")
        return 1
    sys.stdout.write(
        f"{options.target}: {options.target.stat().st_size:,} bytes; {len(recording.cells)} cells, "
        f"{len(recording.decisions)} decided, {len(recording.checks)} checks, "
        f"{sum(len(timing.rounds) for timing in recording.timings.values()):,} rounds, "
        f"{recording.seconds:.1f} s recorded\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
