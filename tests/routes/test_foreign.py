"""What another package's route says of its kernels is handed on; it need not say anything."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.domain.cell import Column
from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.routes.base import Capture, Family
from autotune.routes.foreign import Misfit, examine

COLUMN = Column(Shape(8, 1, 128, 16), DTypes("bf16", "bf16", "bf16"), 4, 1, 256)
CPU = Facts("cpu", {}, {})


class Silent:
    """A route that satisfies the protocol and no more."""

    name = "theirs"
    family = Family.DECODE
    capture = Capture.FREE
    needs: frozenset[Any] = frozenset()
    deterministic = False
    version = 1

    def supports(self, column: Column, facts: Facts) -> None:
        return None

    def open(self, capacity: Any, allocate: Any) -> Any:
        raise NotImplementedError


class Telling(Silent):
    """It also says whether its kernels are here."""

    def available(self, column: Column, facts: Facts) -> str | None:
        return f"no kernel for q_len {column.q_len} on {facts.device}"


def test_a_route_that_does_not_say_is_taken_to_be_here() -> None:
    assert examine(Silent(), "theirs").available(COLUMN, CPU) is None


def test_what_a_route_says_is_handed_on() -> None:
    assert examine(Telling(), "theirs").available(COLUMN, CPU) == "no kernel for q_len 4 on cpu"


@pytest.mark.parametrize(
    ("available", "said"),
    [("yes", "available is not a method"), (lambda column: None, "available does not take two arguments")],
)
def test_one_that_cannot_be_asked_is_no_route(available: object, said: str) -> None:
    made = Silent()
    made.available = available  # type: ignore[attr-defined]
    with pytest.raises(Misfit, match=said):
        examine(made, "theirs")
