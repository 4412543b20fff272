"""``autotune run --replay FILE``: the same search and the same decisions from a recorded study, no device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.exits import CliError, Exit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autotune.cli.context import Asked
    from autotune.replay.replay import Replayed
    from autotune.replay.study_file import Choose
    from autotune.store.records import Study

FILE = "replay.json"


def run_replay(
    asked: Asked,
    file: Path,
    out: Path,
    *,
    budget_s: float | None,
    trials: int | None = None,
    only: str | None = None,
    as_json: bool = False,
    adaptive: bool = False,
    weights: Mapping[str, float] | None = None,
) -> int:
    """Replay ``file`` and write ``out/replay.json``; never a table.

    Raises:
        RecordingError: the file cannot be replayed; nothing was written (exit 1).
        CliError: ``--routes`` or ``--out`` makes no sense.
    """
    from autotune.cli.context import all_routes, require_context, target, writable
    from autotune.cli.output import print_json, print_text, stderr
    from autotune.replay.read import read_recording
    from autotune.replay.replay import replay
    from autotune.replay.routes import recorded_routes
    from autotune.report.progress import ProgressView

    registered = all_routes(asked.grid.space.device.kind, only)
    recording = read_recording(file, _chooser(asked, file))
    routes = recorded_routes(recording, registered, None if only is None else registered)
    require_context(asked, routes)
    writable(out)
    there = replace(target(asked, recording.study.fingerprint.facts), seed=recording.study.seed)
    # the view counts this machine's seconds, the budget recorded ones
    with ProgressView(stderr, budgeted=False) as view:
        found = replay(
            recording,
            there,
            routes,
            budget_s=budget_s,
            trials=trials,
            adaptive=adaptive,
            weights=weights,
            listener=view,
        )
    document = found.to_dict()
    path = out / FILE
    _write(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    if as_json:
        print_json({**document, "file": str(path)})
    else:
        print_text(_summary(found, path))
    return int(Exit.DONE)


def _chooser(asked: Asked, file: Path) -> Choose:
    """Takes the one study of the asked GPU that has any of the asked cells."""
    from autotune.replay.errors import RecordingError

    ids = {item.cell.id for item in asked.grid.cells}
    device = asked.grid.space.device

    def choose(offers: list[tuple[Study, frozenset[str]]]) -> Study:
        fitting = [
            study
            for study, cells in offers
            if device.matches(study.fingerprint.facts) and not ids.isdisjoint(cells)
        ]
        if not fitting:
            raise RecordingError(
                f"{file}: no study of --gpu {asked.profile} with any of the cells of --engine "
                f"{asked.grid.engine.name}; {_holds(offers)}"
            )
        if len(fitting) > 1:
            names = ", ".join(study.id for study in fitting)
            raise RecordingError(
                f"{file}: several studies have these cells: {names}; make a file of one with "
                "scripts/thin_evidence.py --study ID"
            )
        return fitting[0]

    return choose


def _holds(offers: list[tuple[Study, frozenset[str]]]) -> str:
    names = sorted({str(study.fingerprint.facts.hardware.get("name")) for study, _ in offers})
    return f"it holds studies of {', '.join(names)}" if names else "it holds no study"


def _write(path: Path, text: str) -> None:
    """The whole file or nothing of it."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        try:
            partial.write_text(text, "utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror or error}; name a folder that can be written") from error


def _summary(found: Replayed, path: Path) -> str:
    recording = found.recording
    first = next(iter(found.answers.values()))
    settled = sum(each.final for each in first)
    tau = "not measured" if found.tau is None else f"{found.tau:.2%}"
    lines = [
        f"replayed study {recording.study.id}, {recording.study.fingerprint.facts.hardware.get('name')}: "
        f"{settled} of {len(first)} cells settled in {found.seconds:.1f} s of recorded time "
        f"(all that is recorded: {recording.seconds:.1f} s)",
        f"gain of the table as it stands: {found.gain:.3f} "
        "(sum of weight x log(fallback's time / choice's time))",
        f"margin {found.margin:g}, tau {tau}, as recorded; second processes come as recorded, in no time",
    ]
    for engine, answers in found.answers.items():
        routed = sum(each.decision.route is not None for each in answers)
        lines.append(f"{engine}: {routed} cells name another route than the fallback")
    if found.out_of_budget:
        lines.append("the budget ended it")
    if found.unrecorded:
        lines.append(
            f"not recorded: {len(found.unrecorded)} cells stay unproven ({found.missing_checks} checks, "
            f"{found.missing_timings} timings)"
        )
    return "\n".join([*lines, f"written: {path} (no table: nothing was measured)"])
