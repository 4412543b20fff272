"""The checks' names and versions, which are kept apart from their bodies."""

from __future__ import annotations

from autotune.checks import catalogue, registry


def test_every_check_is_listed_in_running_order_with_its_own_version() -> None:
    assert [(check.name, check.version) for check in registry.CHECKS] == list(catalogue.LISTED.items())
    assert [(check.name, check.version) for check in registry.UNLISTED] == list(catalogue.UNLISTED.items())
    assert set(catalogue.LISTED) > catalogue.STATES_LIMITS


def test_the_versions_of_stored_proofs_still_count() -> None:
    # a row of another version is run again: whoever raises one changes this line on purpose
    assert {name for name, version in catalogue.LISTED.items() if version == 1} == {"extreme_logits"}
    assert set(catalogue.LISTED.values()) == {1, 2}
