"""What a run over a space loads, as the installed library names it, and what of it is here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.routes.flashinfer.ask import pairs
from autotune.routes.flashinfer.library import LibraryError, library

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Route
    from autotune.routes.flashinfer.library import Library


@dataclass(slots=True)
class Wanted:
    """Modules by name.

    Attributes:
        modules: name -> where the library finds it built; None if nowhere.
        routes: name -> the routes that load it.
        head_dims: name -> head sizes of the columns that load it.
        refused: what the library's Python layer refuses, a line each.
        precompiled: routes among them whose kernels are cubins.
    """

    modules: dict[str, Path | None] = field(default_factory=dict)
    routes: dict[str, set[str]] = field(default_factory=dict)
    head_dims: dict[str, set[int]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    precompiled: set[str] = field(default_factory=set)

    @property
    def missing(self) -> list[str]:
        """Names of the modules that are not built, in order."""
        return sorted(name for name, path in self.modules.items() if path is None or not path.is_file())


def wanted(
    facts: Facts, columns: Iterable[Column], routes: Mapping[str, Route], asked: Library | None = None
) -> Wanted:
    """What ``routes`` load for ``columns`` on a device with these facts, and what the self-test loads.

    Routes of other packages are left out: this library does not know their modules.

    Args:
        asked: the library to ask; the installed one if None.

    Raises:
        LibraryError: FlashInfer cannot be imported.
    """
    from autotune.routes.flashinfer.catalogue import routes as ours

    known = [route for route in ours() if route.name in routes]
    others = [route for route in ours() if route.name == "xqa-decode" and route.name not in routes]
    asked = asked or library(str(facts.hardware["compute_capability"]))
    found = Wanted()
    # the self-test runs XQA whatever routes were chosen
    todo = [*pairs(columns, known, facts, selftest=True), *pairs((), others, facts, selftest=True)]
    for route, column in todo:
        if getattr(route, "precompiled", False):
            found.precompiled.add(route.name)
        try:
            modules = asked.modules(route.name, column)
        except LibraryError as error:
            if error.unusable:
                raise
            found.refused.append(str(error))
            continue
        for name, path in modules.items():
            found.modules[name] = None if path is None else Path(path)
            found.routes.setdefault(name, set()).add(route.name)
            found.head_dims.setdefault(name, set()).add(column.shape.head_dim)
    return found
