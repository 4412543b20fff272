"""``autotune ab``: two live servers, or one whose mode is switched, against each other."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.options import Json

# A day; a socket refuses times that its clock cannot count.
_LONGEST_S = 86400


def command(
    a: Annotated[str, typer.Option("--a", metavar="URL", help="Server A, such as the stock one.")],
    b: Annotated[str, typer.Option("--b", metavar="URL", help="Server B, such as the one with a table.")],
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="N,...", help="Requests at once; one case each.")
    ] = "1,16",
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", min=2, help="Output tokens.")] = 256,
    words: Annotated[int, typer.Option("--prompt-words", metavar="N", min=1, help="Words a prompt.")] = 512,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=1, help="Rounds a case; under 10 nothing can be said.")
    ] = 16,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The first that a server lists if left out.")
    ] = None,
    no_flush: Annotated[
        bool, typer.Option("--no-flush", help="Leave the prefix caches as they are between turns.")
    ] = False,
    switch: Annotated[
        str | None,
        typer.Option(
            "--switch",
            metavar="COMMAND",
            help="Run COMMAND a, or COMMAND b, before a turn: one server whose mode is switched.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.1, help="Longest silence of a server.")
    ] = 60.0,
    key_env: Annotated[
        str | None,
        typer.Option(
            "--key-env", metavar="NAME", help="Environment variable that holds the servers' API key."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of prompts and order.")] = 0,
    json: Json = False,
) -> int:
    """Measure output tokens/s and time per token of two servers in interleaved rounds. Needs no GPU here."""
    from autotune.cli.output import note, print_json, print_text
    from autotune.engines.ab.compare import as_json, as_text, compare
    from autotune.engines.ab.server import Server
    from autotune.engines.ab.switch import Switch
    from autotune.engines.ab.turn import Case

    if not timeout <= _LONGEST_S:  # nan too
        raise CliError(f"--timeout {timeout:g}: give seconds from 0.1 to {_LONGEST_S}", Exit.USAGE)
    headers = {} if key_env is None else {"Authorization": f"Bearer {_key(key_env)}"}
    try:
        servers = [Server(url, timeout_s=timeout, headers=headers) for url in (a, b)]
        switched = None if switch is None else Switch(switch)
    except ValueError as error:
        raise CliError(str(error), Exit.USAGE) from error
    if servers[0].url == servers[1].url and switched is None:
        raise CliError(
            "--a and --b are one server; --switch COMMAND says how its mode is switched", Exit.USAGE
        )
    cases = [Case(size, words, max_tokens) for size in _sizes(concurrency)]
    found = compare(
        servers[0],
        servers[1],
        cases,
        rounds=rounds,
        model=model,
        flush=not no_flush,
        switch=switched,
        seed=seed,
        progress=note,
    )
    if json:
        print_json({"a": servers[0].url, "b": servers[1].url, "cases": as_json(found)})
    else:
        print_text(as_text(found))
    return 0


def _key(name: str) -> str:
    """What the variable holds. What is wrong with it is said without it: it is a secret."""
    try:
        key = os.environ.get(name, "").strip()
    except ValueError:  # no name of a variable
        key = ""
    if not key:
        raise CliError(f"--key-env {name}: the variable is not set", Exit.USAGE)
    if any(not (" " <= each <= "~" or "\xa0" <= each <= "\xff") for each in key):
        raise CliError(
            f"--key-env {name}: its value has a control or non-Latin-1 character, which no HTTP header takes",
            Exit.USAGE,
        )
    return key


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) > 4096 or len(set(sizes)) != len(sizes):
        raise CliError(f"--concurrency {text}: distinct numbers from 1 to 4096, by commas", Exit.USAGE)
    return sizes
