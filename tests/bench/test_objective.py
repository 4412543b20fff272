from __future__ import annotations

import pytest

from autotune.bench.eprocess import Unit
from autotune.bench.objective import graph, paired_ratios, step
from autotune.bench.record import Round, RoundSettings


def round_(index: int, **run_us: float) -> Round:
    names = tuple(run_us)
    return Round(
        index,
        names,
        run_us,
        {name: 2.0 * run_us[name] for name in names},
        dict.fromkeys(names, 8.0),
        dict.fromkeys(names, 3),
    )


def test_ratios_pair_within_a_round_in_round_order() -> None:
    rounds = [round_(2, a=10.0, b=2.0), round_(0, a=10.0, b=5.0), round_(1, a=10.0)]
    assert paired_ratios(rounds, "a", "b") == [2.0, 5.0]
    assert paired_ratios(rounds, "b", "a") == [0.5, 0.2]
    assert paired_ratios(rounds, "a", "absent") == []


def test_ratios_in_blocks() -> None:
    rounds = [round_(i, a=float(i + 1), b=1.0) for i in range(9)]
    assert paired_ratios(rounds, "a", "b", unit=Unit.BLOCK4) == [2.0, 6.0]


def test_step_charges_what_is_not_hidden_and_every_layer() -> None:
    one = round_(0, a=10.0)
    assert graph(one, "a") == 10.0
    assert step(4)(one, "a") == 8.0 + 4 * 20.0  # host time is the longer one here
    assert step(4, hidden=0.75)(one, "a") == 2.0 + 80.0
    for layers, hidden in ((0, 0.0), (1, 1.5), (1, -0.1)):
        with pytest.raises(ValueError, match="layers must be"):
            step(layers, hidden)


def test_round_survives_json_and_refuses_a_missing_route() -> None:
    one = round_(5, a=1.5, b=2.5)
    assert Round.from_dict(one.to_dict()) == one
    data = one.to_dict()
    del data["calls"]["b"]
    with pytest.raises(ValueError, match="round 5"):
        Round.from_dict(data)


@pytest.mark.parametrize(
    "values", [{"min_group_ms": 0.0}, {"discard_ms": -1.0}, {"discard_rounds": 0}, {"chunk": 0}]
)
def test_senseless_settings_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        RoundSettings(**values)  # type: ignore[arg-type]
