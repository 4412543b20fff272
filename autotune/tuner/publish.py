"""From a study's stored rows to its table."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import autotune
from autotune.domain.decision import Decision, Reason
from autotune.domain.margin import margin_of
from autotune.domain.verdict import CheckStatus
from autotune.table.build import DecidedCell, build_table
from autotune.table.dump import write_table
from autotune.table.model import Generated, Policy, Quarantine, RoutingTable, Unsafe
from autotune.tuner.objectives import STEP
from autotune.tuner.run import ALPHA

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from autotune.domain.fingerprint import Facts
    from autotune.store.records import Proof
    from autotune.tuner.run import OpenedRun

# Shown per route and kind; the database has every row.
UNSAFE_SHOWN = 3


def file_name(facts: Facts, engine: str) -> str:
    """``nvidia-h200.sglang.yaml``: the device's own name, so that a folder of tables can be searched."""
    if facts.device == "cpu":
        return f"cpu.{engine}.yaml"
    slug = re.sub(r"[^a-z0-9]+", "-", str(facts.hardware["name"]).lower()).strip("-")
    return f"{slug}.{engine}.yaml"


@dataclass(frozen=True)
class Published:
    """A table that was written: where, its digest, and the decisions in it."""

    path: Path
    digest: str
    table: RoutingTable
    cells: tuple[DecidedCell, ...]


def decide_all(run: OpenedRun, objective: str | None = None) -> tuple[DecidedCell, ...]:
    """The answer of every cell of the study, from its rows; open cells come out unproven.

    Args:
        objective: one that the study declares; its first if None.
    """
    found = []
    for item in run.cells:
        known = run.judge.known(item.cell, objective)
        decision = known.decision
        verdict = None
        if decision.route is not None:
            verdict = run.judge.verdict(run.judge.routes[decision.route], item.cell)
        found.append(
            DecidedCell(
                cell=item.cell,
                decision=decision,
                models=item.models,
                fallback=known.fallback,
                verdict=verdict,
                fallback_error=known.fallback_error,
                fallback_requires=known.fallback_requires,
            )
        )
    return tuple(found)


def accused(run: OpenedRun) -> Iterator[Proof]:
    """Failed rows of the study's columns, oldest first.

    Rows of another version of the route or of the check do not count here either.
    """
    columns = {item.cell.column.id for item in run.cells}
    versions = {name: route.version for name, route in run.judge.routes.items()}
    for proof in run.repository.all_proofs(run.fingerprint, CheckStatus.FAILED):
        if proof.column.id not in columns:
            continue
        if versions.get(proof.route) == proof.route_version and run.book.counts(proof.result):
            yield proof


def accusations(run: OpenedRun) -> tuple[Unsafe, ...]:
    """The accused: a few of each route and kind, with the command that repeats one."""
    shown: dict[tuple[str, str], int] = {}
    found = []
    for proof in accused(run):
        result = proof.result
        assert result.kind is not None
        key = (proof.route, result.kind.value)
        shown[key] = shown.get(key, 0) + 1
        if shown[key] <= UNSAFE_SHOWN:
            found.append(
                Unsafe(
                    route=proof.route,
                    cell=str(proof.column),
                    kind=result.kind.value,
                    detail=f"{result.check}: {result.detail}",
                    repro=proof.repro,
                )
            )
    return tuple(found)


def build(run: OpenedRun, objective: str | None = None) -> tuple[RoutingTable, tuple[DecidedCell, ...]]:
    """The study's table, validated; its policy names the objective that decided it.

    Faults are read anew first: a table must not name what its own ``unsafe`` accuses.
    """
    run.book.renew()
    cells = decide_all(run, objective)
    study, target = run.study, run.target
    stock = target.engine.stock(target.arch)
    decided_by = objective or run.judge.objectives.first
    stepped = run.judge.objectives if decided_by == STEP else None
    tau = run.judge.tau(objective)
    withdrawn = [
        Quarantine(
            route=row.route,
            reason=row.reason,
            at=row.created_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            shape=row.column.shape,
            dtypes=row.column.dtypes,
            q_len=row.column.q_len,
            batch_size=row.column.batch_size,
        )
        for row in run.repository.quarantined(run.fingerprint)
    ]
    table = build_table(
        cells,
        facts=target.facts,
        generated=Generated(
            by=f"autotune {autotune.__version__}",
            at=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            study=study.id,
        ),
        policy=Policy(
            engine=target.engine.name,
            stock=stock,
            objective=decided_by,
            margin=margin_of(study.margin, tau),
            tau=tau,
            any_false_claim=ALPHA,
            pad_value=target.pad_value,
            layers=stepped.chosen_layers if stepped else None,
            # nothing hidden is what its absence says
            hidden_prepare=(stepped.hidden or None) if stepped else None,
        ),
        families={name: route.family.value for name, route in run.judge.routes.items()},
        unsafe=accusations(run),
        quarantine=withdrawn,
    )
    return table, tuple(_withheld(cell, withdrawn) for cell in cells)


def _withheld(cell: DecidedCell, items: list[Quarantine]) -> DecidedCell:
    """The cell as its letter says it: quarantines are no part of the decision."""
    column = cell.cell.column
    gone = {
        item.route: item.reason
        for item in items
        if item.shape in (None, column.shape)
        and item.dtypes in (None, column.dtypes)
        and item.q_len in (None, column.q_len)
        and item.batch_size in (None, column.batch_size)
    }
    if cell.fallback in gone:
        detail = f"fallback {cell.fallback} is quarantined: {gone[cell.fallback]}"
        return replace(cell, decision=Decision(None, Reason.NO_SAFE_ROUTE, detail))
    route = cell.decision.route
    if route is not None and route in gone:
        return replace(cell, decision=Decision(None, Reason.QUARANTINED, f"{route}: {gone[route]}"))
    return cell


def table_path(run: OpenedRun, folder: Path) -> Path:
    """Where the table of a run's device and engine is written in ``folder``."""
    return folder / file_name(run.target.facts, run.target.engine.name)


def publish(run: OpenedRun, folder: Path, objective: str | None = None) -> Published:
    """Write the table to ``folder`` and note the export.

    Args:
        objective: one that the study declares; its first if None.

    Raises:
        TableWriteError: the folder cannot be written; nothing of an older table is lost.
    """
    table, cells = build(run, objective)
    path = table_path(run, folder)
    digest = write_table(table, path)
    run.repository.record_export(run.study, "table", str(path), digest)
    return Published(path, digest, table, cells)
