"""What a proof asks of an engine goes from the check's row to the router, which asks the engine for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.arena.base import Arena, Placement
from autotune.arena.factory import open_arena
from autotune.checks import registry
from autotune.checks.base import Trial
from autotune.checks.controls import COLUMN, KV_LENS
from autotune.domain.fingerprint import Facts
from autotune.domain.verdict import CheckResult, Requirement, Status, conclude
from autotune.router import Router
from autotune.routes.base import Route
from autotune.routes.planted import Planted
from autotune.store.database import open_database
from autotune.store.repository import Repository
from autotune.table.dump import write_table
from tests.table import samples

torch.set_num_threads(1)


def row_of(fault: str, check: str) -> CheckResult:
    """The row that a check makes of a planted kernel."""

    def arena(placement: Placement) -> Arena:
        return open_arena("host_mmap", "cpu", placement, 0)

    route: Route = Planted(fault)
    trial = Trial(route, COLUMN, Facts("cpu", {}, {}), KV_LENS, 1, "cpu", arena, lambda text: None)
    return registry.get(check).run(trial)


@pytest.fixture(scope="module")
def rows() -> list[CheckResult]:
    return [row_of("planted-nan-tail", "nan_pool"), row_of("planted-clean", "scattered_pages")]


@pytest.fixture
def path(rows: list[CheckResult], tmp_path: Path) -> Path:
    """The table of a cell whose proof was stored, read again and concluded."""
    decided = samples.decided(1, (4, 4096), samples.FASTER)
    with open_database(f"sqlite:///{tmp_path / 'proofs.db'}") as database:
        repository = Repository(database)
        here = repository.register_fingerprint(samples.FACTS)
        column = decided.cell.column
        repository.save_proofs(here, column, samples.SPLIT, 1, [(row, "") for row in rows])
        verdict = conclude(repository.proofs(here, column, samples.SPLIT, 1), [row.check for row in rows])
    assert verdict.status is Status.SAFE
    written = tmp_path / "table.yaml"
    write_table(samples.table_of([replace(decided, verdict=verdict)]), written)
    return written


def test_the_rows_say_what_they_ask_and_how_far_they_went(rows: list[CheckResult]) -> None:
    assert rows[0].requires == (Requirement.FINITE_POOL.value,)
    assert len(rows[1].limits) == 1 and rows[1].limits[0].startswith("page ids below ")


def test_a_router_asks_for_it_and_shows_the_limit(rows: list[CheckResult], path: Path) -> None:
    router = Router.load(path, facts=samples.FACTS)
    asked = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096)
    assert asked.route(1, 4) == samples.FALLBACK and not asked.use_decode(1, 4)
    refused = asked.explain(1, 4)
    assert refused.why == "requires_not_attested" and "finite_pool" in refused.detail
    attested = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096, attests={"finite_pool"})
    assert attested.route(1, 4) == samples.SPLIT
    proof = attested.explain(1, 4).proof
    assert proof is not None and proof.limits == rows[1].limits and proof.requires == rows[0].requires


@pytest.mark.parametrize("need", list(Requirement))
def test_no_other_attestation_will_do(need: Requirement, rows: list[CheckResult], tmp_path: Path) -> None:
    verdict = conclude([replace(rows[0], requires=(need.value,)), rows[1]], [row.check for row in rows])
    decided = samples.decided(1, (4, 4096), samples.FASTER)
    written = tmp_path / "table.yaml"
    write_table(samples.table_of([replace(decided, verdict=verdict)]), written)
    router = Router.load(written, facts=samples.FACTS)
    for attests in (set(), {other.value for other in Requirement} - {need.value}, {need.value.upper()}):
        bound = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096, attests=attests)
        assert bound.route(1, 4) == samples.FALLBACK
    bound = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096, attests={need.value})
    assert bound.route(1, 4) == samples.SPLIT
