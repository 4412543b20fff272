"""Where the shipped files are: the repository's ``search_spaces/``, or the copy in the wheel."""

from __future__ import annotations

from pathlib import Path

import autotune
from autotune.space.errors import SpaceError, UnknownProfile
from autotune.space.reader import listed, suggest


def folder() -> Path:
    """The folder of search spaces.

    A repository's own folder comes first: an editable install leaves an outdated copy in the package.

    Raises:
        SpaceError: there is neither, so the installation is broken.
    """
    package = Path(autotune.__file__).resolve().parent
    repository = package.parent
    if (repository / "pyproject.toml").is_file() and (repository / "search_spaces").is_dir():
        return repository / "search_spaces"
    shipped = package / "_data" / "search_spaces"
    if shipped.is_dir():
        return shipped
    raise SpaceError(f"{shipped}: the shipped search spaces are not there; install the package again")


def _names(kind: str) -> list[str]:
    return sorted(path.stem for path in (folder() / kind).glob("*.yaml"))


def profiles() -> list[str]:
    """Names that ``--gpu`` takes."""
    return _names("")


def engine_names() -> list[str]:
    """Names that ``--engine`` takes."""
    return _names("engines")


def model_names() -> list[str]:
    """Names of the shipped models."""
    return _names("models")


def profile_file(name: str) -> Path:
    """The search space of ``--gpu NAME``; raises :class:`UnknownProfile`, which lists the profiles."""
    known = profiles()
    if name not in known:
        raise UnknownProfile(f"--gpu {name}: unknown profile{suggest(name, known)}; known: {listed(known)}")
    return folder() / f"{name}.yaml"


def engine_file(name: str) -> Path:
    """The engine file of ``--engine NAME``; raises :class:`SpaceError`."""
    known = engine_names()
    if name not in known:
        raise SpaceError(f"--engine {name}: unknown engine{suggest(name, known)}; known: {listed(known)}")
    return folder() / "engines" / f"{name}.yaml"


def model_file(name: str, near: Path) -> Path | None:
    """A model's file: ``models/NAME.yaml`` beside the search space ``near``, else the shipped one."""
    for models in (near.resolve().parent / "models", folder() / "models"):
        if name in {path.stem for path in models.glob("*.yaml")}:
            return models / f"{name}.yaml"
    return None
