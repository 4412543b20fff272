"""Options that a command takes as one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from autotune.cli.gathered import gathered
from tests.console import cli


@dataclass(frozen=True)
class Pair:
    first: Annotated[int, typer.Option("--first", help="One of two.")] = 1
    other: Annotated[str | None, typer.Option("--second")] = None


def run(command: object, *arguments: str) -> object:
    app = typer.Typer(add_completion=False)
    app.command()(gathered(command))  # type: ignore[arg-type]
    return app(args=list(arguments), standalone_mode=False)


def test_the_fields_are_options_in_the_place_of_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def command(
        name: Annotated[str, typer.Argument()],
        pair: Pair = Pair(),
        last: Annotated[bool, typer.Option()] = False,
    ) -> int:
        """Says what it does."""
        seen.append((name, pair, last))
        return 7

    assert run(command, "x", "--second", "two", "--last") == 7
    assert run(command, "y", "--first", "3") == 7
    assert seen == [("x", Pair(1, "two"), True), ("y", Pair(3), False)]
    run(command, "--help")
    said = capsys.readouterr().out
    assert "Says what it does." in said and "One of two." in said
    assert said.index("--first") < said.index("--second") < said.index("--last")


def test_two_options_of_one_name_are_refused() -> None:
    def command(first: int = 0, pair: Pair = Pair()) -> int:
        return first + pair.first

    with pytest.raises(ValueError, match="duplicate parameter name: 'first'"):
        gathered(command)


@pytest.mark.parametrize("command", ["run", "plan", "export"])
def test_the_commands_that_take_a_part_take_the_same_one(command: str) -> None:
    lines = cli(command, "--help").out.splitlines()
    flags = [line.split()[0] for line in lines if line.lstrip().startswith("--")]
    begin = flags.index("--models")
    part = ["--models", "--attn-tp", "--dtype", "--q-len", "--batch", "--kv", "--cells"]
    assert flags[begin : begin + 7] == part
