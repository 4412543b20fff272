"""Entry point: parse, run one command, turn what is known to go wrong into one line and an exit code.

Imports stay inside the commands: the children of the fork server import this module again, and
``autotune show`` must not wait for torch.
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.output import fail_line


def build_app() -> typer.Typer:
    """The Typer application with every command."""
    from autotune.cli import doctor, explain, export, plan, prove, run, selftest, show

    app = typer.Typer(
        name="autotune",
        help="Which attention kernel may an engine call, on this GPU, for this batch: proven, then timed.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for module in (run, plan, doctor, selftest, prove, export, show, explain):
        app.command(module.__name__.rsplit(".", 1)[-1])(module.command)
    return app


def exit_of(error: BaseException) -> tuple[str, Exit] | None:
    """The line and the exit code of an error that is not a bug; None for one that is."""
    if isinstance(error, CliError):
        return str(error), error.code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; the same command goes on from here", Exit.INTERRUPTED
    if hasattr(error, "format_message"):  # Typer's usage errors
        return f"{error.format_message()} (see autotune --help)", Exit.USAGE
    code = getattr(error, "exit_code", None)
    if isinstance(code, int) and isinstance(error, Exception):
        return str(error), Exit(code)
    by_name = {
        "SpaceError": Exit.USAGE,
        "UnknownProfile": Exit.USAGE,
        "UnknownCheckError": Exit.USAGE,
        "UnknownRoute": Exit.USAGE,
        "TableError": Exit.USAGE,
        "StoreError": Exit.FAILED,
        "TableWriteError": Exit.FAILED,
        "WorkerError": Exit.FAILED,
    }
    for kind in type(error).__mro__:
        if kind.__module__.startswith("autotune.") and kind.__name__ in by_name:
            return str(error), by_name[kind.__name__]
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", Exit.FAILED
    return None


def main(arguments: list[str] | None = None) -> None:
    """Console script ``autotune``; always ends by ``SystemExit``."""
    result: Any = None
    try:
        result = build_app()(args=arguments, prog_name="autotune", standalone_mode=False)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nothing is left to say
        sys.exit(Exit.FAILED)
    except SystemExit:
        raise
    except BaseException as error:
        known = exit_of(error)
        if known is None:
            if type(error).__name__ == "Abort":
                known = exit_of(KeyboardInterrupt())
            if known is None:
                raise
        line, code = known
        fail_line(line)
        sys.exit(int(code))
    sys.exit(int(result) if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
