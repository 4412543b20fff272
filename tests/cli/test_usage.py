"""Wrong usage: exit 2, one line, no traceback; and what every command says of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import autotune
from autotune.cli.budget import seconds
from autotune.cli.exits import CliError
from autotune.cli.main import build_app, exit_of
from autotune.space.library import profiles
from tests.console import TINY, Place, cli

COMMANDS = (
    *("run", "plan", "doctor", "selftest", "prove", "prebuild", "export", "show", "explain"),
    *("verify", "diff", "quarantine", "suspects", "sign", "ab"),
)


def test_version() -> None:
    result = cli("--version")
    assert (result.code, result.out, result.err) == (0, f"autotune {autotune.__version__}\n", "")


def test_without_a_command() -> None:
    result = cli()
    assert result.code == 2
    assert result.out == ""
    assert all(f"\n  {name} " in result.err for name in COMMANDS)


def test_the_exit_codes_are_in_the_help() -> None:
    text = " ".join(cli("--help").out.split())
    for code in (
        "0 done",
        "1 failed",
        "2 wrong usage",
        "3 this machine",
        "4 a control",
        "5 some cells",
        "130",
    ):
        assert code in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    result = cli(command, "--help")
    assert result.code == 0
    assert result.err == ""
    assert all(len(line) <= 80 for line in result.out.splitlines())
    assert "--json" in result.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "--gpu or --space is needed"),
        (["nonsense"], "No such command 'nonsense'"),
        (["run", "--gpu", "cpu", "--nonsense"], "No such option: --nonsense"),
        (["run", "--gpu", "cpu", "--trials", "0"], "greater than or equal to 1"),
        (["run", "--gpu", "cpu", "--trials", "x"], "valid integer"),
        (["run", "--gpu", "cpu", "--engine", "nonsense"], "known: generic, sglang, vllm"),
        (["run", "--gpu", "cpu", "--engine", "nonsense.yaml"], "nonsense.yaml"),
        (["run", "--gpu", "h200", "--space", str(TINY)], "gpu: is 'cpu', but --gpu says 'h200'"),
        (["run", "--gpu", "cpu", "--db", "mysql://host/name"], "'mysql' is not supported"),
        (["run", "--gpu", "cpu", "--db", "evidence.db"], "did you mean 'sqlite:///evidence.db'?"),
        (["run", "--space", "no-such.yaml"], "no-such.yaml"),
        (["plan", "--gpu", "cpu", "--batch", "1,x"], "--batch '1,x': write whole numbers"),
        (["plan", "--gpu", "cpu", "--batch", "3"], "--batch 3: not in the space, which has 1, 8"),
        (["run", "--gpu", "cpu", "--models", "llama-9"], "--models llama-9: not in the space"),
        (["run", "--gpu", "cpu", "--dtype", ""], "--dtype: names nothing; the space has fp32, bf16"),
        (["export", "--gpu", "cpu", "--kv", "4097"], "--kv 4097: not in the space"),
        (["export", "--gpu", "cpu", "--objective", "step"], "--objective step: the space declares graph"),
        (["plan", "--gpu", "cpu", "--routes", ""], "--routes '': names no route; there are torch-"),
        (["show", "no-such-table.yaml"], "no-such-table.yaml"),
        (["prove", "nonsense", "--column", "{}", "--kv-lens", "1"], "not a stored column"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    result = cli(*arguments, *(["--out", tmp_path / "out"] if arguments[0] == "run" else []))
    assert result.code == 2
    assert result.out == ""
    assert said in result.line


def test_an_unknown_profile_lists_them() -> None:
    result = cli("run", "--gpu", "nonsense")
    assert result.code == 2
    assert all(name in result.line for name in profiles())


@pytest.mark.parametrize("text", ["0", "0s", "abc", "-5", "10 m", "", "1e3", "5d", "inf", "nan"])
def test_a_budget_that_is_none(text: str, place: Place) -> None:
    result = cli("run", *place.flags(), f"--budget={text}")
    assert result.code == 2
    assert "--budget" in result.line
    assert not place.file.exists()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("1h30m", 5400.0), ("0.1s", 0.1), (" 10M ", 600.0)],
)
def test_budgets(text: str, wanted: float) -> None:
    assert seconds(text) == wanted


def replaced(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replaced("q_len: [2]", "\tq_len: [2]"), "tab"),
        (replaced("q_len: [2]\n", ""), "q_len"),
        (replaced("q_len: [2]", "q_length: [2]"), "q_length"),
        (replaced("q_len: [2]", "q_len: [0]"), "q_len"),
        (replaced("llama-3.1-70b", "llama-9"), "llama-9"),
        (replaced("search-space/1", "search-space/9"), "schema"),
        (lambda text: "", ""),
        (lambda text: "- 1\n", ""),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_malformed_space(command: str, change: Callable[[str], str], said: str, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(change(TINY.read_text()))
    result = cli(command, "--space", space)
    assert result.code == 2
    assert str(space) in result.line
    assert said in result.line


def test_typer_and_we_agree_on_commands() -> None:
    names = [command.name for command in build_app().registered_commands]
    assert tuple(names) == COMMANDS


def test_a_bug_is_not_hidden() -> None:
    assert exit_of(ValueError("what?")) is None
    assert exit_of(AssertionError()) is None
    assert exit_of(CliError("no")) == ("no", 1)
