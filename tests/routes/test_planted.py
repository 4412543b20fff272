"""The planted routes as routes: by name, picklable, one fault each."""

from __future__ import annotations

import pickle

import pytest

from autotune.checks.controls import CONTROLS
from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.routes.base import Route
from autotune.routes.planted import SESSIONS, CleanSession, Planted


def test_every_fault_is_a_control_and_the_other_way_round() -> None:
    assert set(SESSIONS) == {control.route.name for control in CONTROLS} | {"planted-clean"}


@pytest.mark.parametrize("name", sorted(SESSIONS))
def test_a_fault_is_a_route_that_travels_by_name(name: str) -> None:
    route = Planted(name)
    assert isinstance(route, Route)
    assert pickle.loads(pickle.dumps(route)) == route
    assert name.startswith("planted-")
    session = SESSIONS[name]
    assert session.__doc__ and issubclass(session, CleanSession)


def test_an_unknown_name_is_one_clear_line() -> None:
    with pytest.raises(
        ValueError, match="no planted route is called 'planted-nothing'; there are planted-"
    ) as e:
        Planted("planted-nothing")
    assert "\n" not in str(e.value)


def test_only_on_the_cpu_and_without_sinks() -> None:
    column = Column(Shape(4, 2, 64, 16), PROFILES["bf16"], 3, 3, 512)
    route = Planted("planted-clean")
    assert route.supports(column, Facts("cpu", {}, {})) is None
    assert route.supports(column, Facts("cuda", {}, {})) is not None
    sinks = Column(Shape(4, 2, 64, 16, sinks=True), PROFILES["bf16"], 3, 3, 512)
    assert route.supports(sinks, Facts("cpu", {}, {})) is not None


def test_only_the_documented_one_is_not_deterministic() -> None:
    assert [name for name in sorted(SESSIONS) if not Planted(name).deterministic] == [
        "planted-racing-documented"
    ]
