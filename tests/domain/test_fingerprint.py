from __future__ import annotations

import pytest

from autotune.domain.fingerprint import HARDWARE_KEYS, SOFTWARE_KEYS, Facts, Scalar, mismatches


def facts(device: str) -> Facts:
    return Facts(
        device,
        {key: f"{key}-value" for key in HARDWARE_KEYS[device]},
        {key: f"{key}-value" for key in SOFTWARE_KEYS[device]},
        {"python": "3.11"},
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_equal_facts_match_whatever_is_merely_informative(device: str) -> None:
    other = Facts(device, facts(device).hardware, facts(device).software, {"python": "3.12"})
    assert mismatches(facts(device), other) == []
    assert facts(device).id == other.id


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_binding_fact_binds(device: str) -> None:
    for part, keys in (("hardware", HARDWARE_KEYS[device]), ("software", SOFTWARE_KEYS[device])):
        for key in keys:
            for change in ("changed", "drop", None):
                data = facts(device).to_dict()
                if change == "drop":
                    del data[part][key]
                else:
                    data[part][key] = change
                changed = Facts.from_dict(data)
                assert mismatches(facts(device), changed), (key, change)
                assert mismatches(changed, facts(device)), (key, change)
                assert changed.id != facts(device).id


@pytest.mark.parametrize(("a", "b"), [(1, True), (1, "1"), (0, False), (1, 1.0)])
def test_a_fact_of_another_type_is_another_fact(a: Scalar, b: Scalar) -> None:
    left = facts("cpu").to_dict()
    right = facts("cpu").to_dict()
    left["hardware"]["cores"], right["hardware"]["cores"] = a, b
    assert mismatches(Facts.from_dict(left), Facts.from_dict(right))


def test_a_table_cannot_bring_facts_of_its_own() -> None:
    data = facts("cpu").to_dict()
    data["hardware"]["mood"] = "good"
    assert mismatches(Facts.from_dict(data), facts("cpu")) == ["hardware.mood: unknown fact in the table"]


def test_devices_do_not_mix_and_unknown_ones_are_refused() -> None:
    assert mismatches(facts("cpu"), facts("cuda"))
    with pytest.raises(ValueError, match="device must be one of"):
        Facts.from_dict({"device": "tpu"})
    with pytest.raises(ValueError, match="hardware must be a mapping"):
        Facts.from_dict({"device": "cpu", "hardware": 3})
