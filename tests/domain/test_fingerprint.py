from __future__ import annotations

import pytest

from autotune.domain.fingerprint import HARDWARE_KEYS, SOFTWARE_KEYS, Facts, Scalar, mismatches, unknown


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


def with_software(**changes: Scalar) -> Facts:
    data = facts("cuda").to_dict()
    data["software"].update(changes)
    return Facts.from_dict(data)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_unknown_does_not_equal_unknown(device: str) -> None:
    for part, keys in (("hardware", HARDWARE_KEYS[device]), ("software", SOFTWARE_KEYS[device])):
        for key in set(keys) - {"flashinfer", "cubins"}:
            data = facts(device).to_dict()
            data[part][key] = None
            here = Facts.from_dict(data)
            assert unknown(here) == [f"{part}.{key}"]
            assert mismatches(here, here) == [f"{part}.{key}: not known in the table nor here"]
            assert mismatches(facts(device), here) == [f"{part}.{key}: not known here"]
            assert mismatches(here, facts(device)) == [f"{part}.{key}: not known in the table"]


def test_what_is_not_installed_is_known() -> None:
    without_cubins = with_software(cubins=None)
    without = with_software(cubins=None, flashinfer=None, flashinfer_commit=None)
    for here in (without_cubins, without):
        assert unknown(here) == []
        assert mismatches(here, here) == []
    assert mismatches(without, without_cubins)
    # a FlashInfer that is there has a commit: None beside a version is not known
    here = with_software(flashinfer_commit=None)
    assert mismatches(here, here) == ["software.flashinfer_commit: not known in the table nor here"]


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
