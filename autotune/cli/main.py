"""Entry point: parse, run one command, turn what is known to go wrong into one line and an exit code.

Imports stay inside the commands: ``autotune show`` must not wait for torch.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.output import fail_line
from autotune.cli.signals import Interrupted, interruptible

# By name: the modules of these are imported only by the commands that can raise them. A subclass is found by
# its nearest base that is listed.
EXITS = {
    "autotune.space.errors.SpaceError": Exit.USAGE,
    "autotune.hardware.errors.NoDevice": Exit.WRONG_MACHINE,
    "autotune.hardware.errors.WrongMachine": Exit.WRONG_MACHINE,
    "autotune.hardware.errors.HardwareError": Exit.FAILED,
    "autotune.checks.registry.UnknownCheckError": Exit.USAGE,
    "autotune.routes.registry.UnknownRoute": Exit.USAGE,
    "autotune.table.errors.TableError": Exit.USAGE,
    "autotune.table.errors.TableWriteError": Exit.FAILED,
    "autotune.store.errors.BadUrlError": Exit.USAGE,
    "autotune.store.errors.StoreError": Exit.FAILED,
    "autotune.worker.base.WorkerError": Exit.FAILED,
    "autotune.replay.errors.RecordingError": Exit.FAILED,
    "autotune.prebuild.errors.PrebuildError": Exit.FAILED,
    "autotune.arena.base.ArenaError": Exit.FAILED,
    "autotune.engines.ab.errors.ServerError": Exit.FAILED,
}


def build_app() -> typer.Typer:
    """The Typer application with every command."""
    from autotune.cli import (
        ab,
        diff,
        doctor,
        explain,
        export,
        plan,
        prebuild,
        prove,
        quarantine,
        run,
        selftest,
        show,
        sign,
        suspects,
        verify,
    )

    app = typer.Typer(
        name="autotune",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    tables = (export, show, explain, verify, diff, quarantine, suspects, sign)
    for module in (run, plan, doctor, selftest, prove, prebuild, *tables, ab):
        app.command(module.__name__.rsplit(".", 1)[-1])(module.command)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        from autotune import __version__
        from autotune.cli.output import print_text

        print_text(f"autotune {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Which attention kernel may an engine call on this GPU: proven safe, then proven faster.

    Exit codes: 0 done; 1 failed (database, disk, lock, prebuilt kernels, an unreachable server), or found
    what it looked for (doctor, prove, verify, diff: see their help); 2 wrong usage (flag, YAML); 3 this
    machine is not that GPU; 4 a control failed, nothing was proven; 5 some cells have no safe route; 130
    interrupted, resumable.
    """


def exit_of(error: BaseException) -> tuple[str, Exit] | None:
    """The line and the exit code of an error that is not a bug; None for one that is."""
    if isinstance(error, (Interrupted, KeyboardInterrupt)):
        return "interrupted; what is stored stays, the same command goes on from there", Exit.INTERRUPTED
    if isinstance(error, CliError):
        return str(error), error.code
    if hasattr(error, "format_message"):  # a usage error of Typer's
        return f"{error.format_message().rstrip('.')} (see autotune --help)", Exit.USAGE
    for kind in type(error).__mro__:
        if (code := EXITS.get(f"{kind.__module__}.{kind.__name__}")) is not None:
            return str(error), code
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", Exit.FAILED
    return None


def main(arguments: list[str] | None = None) -> None:
    """Console script ``autotune``; always ends by ``SystemExit``, or by the exception of a bug."""
    try:
        with interruptible():
            code = build_app()(args=arguments, prog_name="autotune", standalone_mode=False)
    except SystemExit:
        raise
    except BaseException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{error}\n")
            sys.exit(Exit.USAGE)
        known = exit_of(error)
        if known is None:
            raise
        fail_line(known[0])
        sys.exit(known[1])
    sys.exit(int(code or 0))


if __name__ == "__main__":
    main()
