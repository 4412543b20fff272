"""From shared flags to the objects that commands work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.cli.exits import CliError, Exit

if TYPE_CHECKING:
    from pathlib import Path

    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Route
    from autotune.space.grid import Grid
    from autotune.tuner.target import Target

# Operand seeds derive from it. Fixed, so that two runs on equal machines make equal proofs.
SEED = 20260509


@dataclass(frozen=True)
class Asked:
    """The grid that the flags name."""

    grid: Grid

    @property
    def profile(self) -> str:
        """The hardware profile's name."""
        return self.grid.space.gpu


def ask(gpu: str | None, engine: str, space: Path | None) -> Asked:
    """Load space and engine files; raises ``SpaceError`` or ``UnknownProfile`` (exit 2)."""
    from autotune.space.engine import load_engine
    from autotune.space.grid import expand
    from autotune.space.space import open_space

    opened = open_space(gpu, space)
    return Asked(expand(opened, load_engine(engine)))


def here(asked: Asked) -> Target:
    """The target on this machine; raises ``WrongMachine`` (exit 3)."""
    from autotune.hardware.match import require

    return target(asked, require(asked.grid.space.device))


def target(asked: Asked, facts: Facts) -> Target:
    """The target with the given facts."""
    from autotune.arena.factory import default_kind
    from autotune.tuner.target import Target

    return Target(
        grid=asked.grid,
        facts=facts,
        device=facts.device,
        arena_kind=default_kind(facts.device),
        seed=SEED,
    )


def all_routes() -> dict[str, Route]:
    """Every registered route; a broken third-party one is said on stderr and left out."""
    from autotune.cli.output import stderr
    from autotune.routes import registry

    found = registry.routes()
    for error in registry.load_errors():
        stderr.print(f"autotune: {error}", style="yellow")
    if not found:
        raise CliError("no route is registered: reinstall the package", Exit.FAILED)
    return dict(found)


def writable(folder: Path) -> None:
    """Make ``folder`` and try a file in it, before anything costly is done for it.

    Raises:
        CliError: it cannot be made or written (exit 1).
    """
    probe = folder / ".autotune-write-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise CliError(
            f"--out {folder}: {error.strerror or error}; name a folder that can be written", Exit.FAILED
        ) from error
