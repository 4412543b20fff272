"""From shared flags to the objects that commands work with."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.cli.exits import CliError, Exit
from autotune.cli.filters import Filters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Route
    from autotune.space.engine import Engine
    from autotune.space.grid import Grid
    from autotune.tuner.selftest import SelfTest
    from autotune.tuner.target import Target

# Operand seeds derive from it. Fixed, so that two runs on equal machines make equal proofs.
SEED = 20260509


@dataclass(frozen=True)
class Asked:
    """The grid that the flags name, and further engines that call the very same cells."""

    grid: Grid
    others: tuple[Engine, ...] = ()

    @property
    def profile(self) -> str:
        """The hardware profile's name."""
        return self.grid.space.gpu


def ask(gpu: str | None, engine: str, space: Path | None, filters: Filters | None = None) -> Asked:
    """Load space and engine files; raises ``SpaceError`` or ``UnknownProfile`` (exit 2).

    Args:
        engine: a shipped engine's name, or the path of a ``.yaml`` file; or several, comma-separated.
        filters: the part of the space that is asked for; all of it if None.

    Raises:
        CliError: the engines do not call the same cells, so one measurement cannot serve them (exit 2).
    """
    from autotune.space.engine import load_engine
    from autotune.space.grid import expand
    from autotune.space.space import open_space

    opened = open_space(gpu, space)
    names = [name.strip() for name in engine.split(",")]
    engines = [load_engine(Path(n) if Path(n).suffix in (".yaml", ".yml") else n) for n in names]
    part = filters or Filters()
    grid = part.restrict(expand(opened, engines[0]))
    for other in engines[1:]:
        if part.restrict(expand(opened, other)).digest != grid.digest:
            raise CliError(
                f"--engine {engine}: {other.name} does not call the same cells as {engines[0].name} (layout, "
                "page size, pad value or context differ); run them one by one",
                Exit.USAGE,
            )
    return Asked(grid, tuple(engines[1:]))


def here(asked: Asked) -> Target:
    """The target on this machine; raises ``WrongMachine`` (exit 3)."""
    from autotune.hardware.match import require

    return target(asked, require(asked.grid.space.device))


def target(asked: Asked, facts: Facts) -> Target:
    """The target with the given facts.

    Raises:
        CliError: this version cannot prove anything on such a device (exit 1).
    """
    from autotune.arena.factory import default_kind
    from autotune.tuner.target import Target

    try:
        arena_kind = default_kind(facts.device)
    except ValueError as error:
        raise CliError(f"--gpu {asked.profile}: {error}") from error
    return Target(
        grid=asked.grid,
        facts=facts,
        device=facts.device,
        arena_kind=arena_kind,
        seed=SEED,
        others=asked.others,
    )


def all_routes(device: str, only: str | None = None) -> dict[str, Route]:
    """Every registered route that may run on ``device`` (``cpu`` or ``cuda``).

    A third party's that cannot be loaded is said on stderr and left out.

    Args:
        only: names, comma-separated; None: all.

    Raises:
        CliError: ``only`` names no route, or one that is not there (exit 2).
    """
    from autotune.cli.output import note
    from autotune.routes import registry

    found = registry.routes(device)
    for error in registry.load_errors():
        note(str(error))
    if only is None:
        return found
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    if not wanted:
        raise CliError(f"--routes {only!r}: names no route; there are {', '.join(found)}", Exit.USAGE)
    if unknown := [name for name in wanted if name not in found]:
        raise CliError(f"--routes {unknown[0]}: there are {', '.join(found)}", Exit.USAGE)
    return {name: route for name, route in found.items() if name in wanted}


def require_context(asked: Asked, routes: Mapping[str, Route]) -> None:
    """Refuse an engine whose fallback is not what a fallback must be, before a table does.

    Raises:
        CliError: one of its fallbacks is a decode route (exit 2).
    """
    from autotune.routes.base import Family

    for name in asked.grid.engine.fallback(asked.grid.architecture):
        if name in routes and routes[name].family is not Family.CONTEXT:
            raise CliError(
                f"engine {asked.grid.engine.name}: fallback {name} is a {routes[name].family.value} route; "
                "a fallback is a context route",
                Exit.USAGE,
            )


def require_controls(test: SelfTest | None) -> None:
    """Refuse to prove anything with checks that missed a planted fault; None: a stored self-test counts."""
    if test is not None and not test.ok:
        missed = ", ".join(f"{row.control} ({row.check}: {row.got})" for row in test.failures)
        raise CliError(
            f"self-test failed, nothing was proven: {missed}; see autotune selftest", Exit.CONTROL_FAILED
        )


def require_database(url: str) -> None:
    """Refuse an SQLite file that is not there: a command that only reads must not make an empty one.

    Raises:
        CliError: there is no such file (exit 1).
    """
    if (path := missing_file(url)) is not None:
        raise CliError(f"{path}: no such database; autotune run makes one, --db names another")


def missing_file(url: str) -> Path | None:
    """The SQLite file that ``url`` names and that does not exist; None in every other case."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return None  # whoever opens it says what is wrong with it
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        return None
    path = Path(parsed.database)
    return None if path.exists() else path


def writable(folder: Path) -> None:
    """Make ``folder`` and try a file in it, before anything costly is done for it.

    Raises:
        CliError: it cannot be made or written (exit 1).
    """
    probe = folder / f".autotune-write-test-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"x")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(
            f"--out {folder}: {error.strerror or error}; name a folder that can be written"
        ) from error
