"""What a deployment sets: ``AUTOTUNE_TABLE``, ``AUTOTUNE_MODE``, ``AUTOTUNE_MISS`` and three files.

| variable | values | default |
|---|---|---|
| ``AUTOTUNE_TABLE`` | a table, or a folder: the one that fits this device and engine | unset: off |
| ``AUTOTUNE_MODE`` | ``off``; ``observe``: count and log what would be routed; ``route`` | ``route`` |
| ``AUTOTUNE_MISS`` | what a call gets that the table does not decide: ``stock`` or ``fallback`` | ``stock`` |
| ``AUTOTUNE_FACTS`` | JSON file of facts (``autotune doctor --json``) | collected here |
| ``AUTOTUNE_STATE`` | folder of the captured routes, for suspects after a crash | ``~/.cache/autotune`` |
| ``AUTOTUNE_TRAFFIC`` | file for counted shapes; ``{pid}`` is replaced | unset: not counted |

A value that has no meaning switches everything off, with one warning line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.domain.fingerprint import Facts

# A folder of shipped tables holds one file per device and engine; a folder with more is another folder.
MOST_TABLES = 256


class Mode(str, Enum):
    """What the plugins do."""

    OFF = "off"
    OBSERVE = "observe"
    ROUTE = "route"


class Miss(str, Enum):
    """What a call gets that the table does not decide, or that breaks the contract."""

    STOCK = "stock"
    FALLBACK = "fallback"


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment, read once.

    Attributes:
        table: file or folder; None where nothing is set.
        problem: why everything is off, in one line, where a value has no meaning; else empty.
    """

    table: Path | None
    mode: Mode
    miss: Miss = Miss.STOCK
    facts: Path | None = None
    state: Path | None = None
    traffic: Path | None = None
    problem: str = ""


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Never raises: what has no meaning gives ``mode`` off and a ``problem``."""
    given = os.environ if environ is None else environ
    table = _path(given, "AUTOTUNE_TABLE")
    try:
        mode = Mode(given.get("AUTOTUNE_MODE", "").strip() or Mode.ROUTE)
        miss = Miss(given.get("AUTOTUNE_MISS", "").strip() or Miss.STOCK)
    except ValueError as error:
        kinds = {Mode: "AUTOTUNE_MODE: off, observe or route", Miss: "AUTOTUNE_MISS: stock or fallback"}
        named = next((text for kind, text in kinds.items() if kind.__name__ in str(error)), "")
        return Settings(table, Mode.OFF, problem=f"{error}; {named}; off")
    if table is None:
        return Settings(None, Mode.OFF)
    state = state_folder(given)
    traffic = given.get("AUTOTUNE_TRAFFIC", "").strip().replace("{pid}", str(os.getpid()))
    return Settings(
        table, mode, miss, _path(given, "AUTOTUNE_FACTS"), state, Path(traffic) if traffic else None
    )


def state_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where captured routes are kept: ``AUTOTUNE_STATE``, or the user's cache; None without a home."""
    given = os.environ if environ is None else environ
    return _path(given, "AUTOTUNE_STATE") or _default_state(given)


def find_table(place: Path, facts: Facts, engine: str) -> Path:
    """``place`` itself, or the one table of that folder which was measured on this machine for ``engine``.

    Raises:
        ValueError: no table of the folder fits, or more than one does; one line.
        OSError: the folder cannot be listed.
    """
    if not place.is_dir():
        return place
    from autotune.domain.fingerprint import mismatches
    from autotune.table.load import TableError, load_table

    fits, why = [], []
    files = sorted(place.glob("*.yaml"))
    if len(files) > MOST_TABLES:
        raise ValueError(f"{place}: {len(files)} tables; name one file")
    for path in files:
        try:
            table = load_table(path)
        except TableError as error:
            why.append(f"{path.name} ({error.problem})")
            continue
        if table.policy.engine != engine:
            continue
        found = mismatches(table.facts, facts)
        if found:
            why.append(f"{path.name} ({found[0]})")
        else:
            fits.append(path)
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise ValueError(f"{place}: {', '.join(path.name for path in fits)} fit this machine; name one file")
    raise ValueError(
        f"{place}: no table for engine {engine} fits this machine"
        + (f": {'; '.join(why[:3])}" if why else f" (of {len(files)} tables none is for it)")
    )


def _path(given: Mapping[str, str], name: str) -> Path | None:
    text = given.get(name, "").strip()
    return Path(text).expanduser() if text else None


def _default_state(given: Mapping[str, str]) -> Path | None:
    base = given.get("XDG_CACHE_HOME", "").strip()
    if base:
        return Path(base) / "autotune"
    try:
        return Path.home() / ".cache" / "autotune"
    except RuntimeError:  # no home in a container: nothing is kept then
        return None
