"""``autotune suspects``: what engine processes that died had captured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.options import Json


def command(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="The engines' state folder; AUTOTUNE_STATE's if left out."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the files that were shown; of live processes none is.")
    ] = False,
    json: Json = False,
) -> int:
    """Name the routes that a process had called when it ended badly.

    A suspect is no proof: autotune prove repeats its checks, autotune quarantine withdraws it.
    """
    import os
    from shlex import quote

    from autotune.cli.output import print_json, print_text
    from autotune.engines.environment import read_settings
    from autotune.engines.suspects import find_suspects, forget_suspects

    # Whether this shell has a table does not matter here: the folder is that of a process which had one.
    place = folder or read_settings({**os.environ, "AUTOTUNE_TABLE": "-"}).state
    if place is None or (folder is not None and not folder.is_dir()):
        raise CliError(
            f"{folder or 'FOLDER'}: no such folder; the engine's AUTOTUNE_STATE names it", Exit.USAGE
        )
    found = find_suspects(place)
    if json:
        rows = [
            {
                "engine": each.engine,
                "pid": each.pid,
                "started": each.started,
                "table": each.table,
                "digest": each.digest,
                "death": each.death,
                "routes": [{"route": route, "cell": cell} for route, cell in each.routes],
            }
            for each in found
        ]
        print_json({"folder": str(place), "suspects": rows})
    else:
        for each in found:
            print_text(str(each))
            routes = dict.fromkeys(route for route, _ in each.routes)
            for route in routes:
                named = f"{quote(each.table)} --route {quote(route)}"
                print_text(f'  autotune quarantine {named} --why "..."')
        if not found:
            print_text(f"{place}: no process ended badly")
    if forget:
        try:
            forget_suspects(found)
        except OSError as error:
            raise CliError(f"--forget: {error.filename}: {error.strerror}") from error
    return int(Exit.DONE)
