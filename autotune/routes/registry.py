"""Which routes there are: ours, and those that other packages add.

A package adds routes through the entry-point group ``autotune.routes``; ours need no entry point, so that a
source checkout works uninstalled. What cannot be loaded is recorded (:func:`load_errors`) and skipped: a
foreign package must not be able to stop a run, nor to say one thing of itself now and another later
(``routes.foreign``). Importing this module imports neither torch nor a route; asking for the CUDA routes
imports neither torch nor FlashInfer: their sessions do, when they are opened.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from autotune.domain.route_name import NOT_FOR_USE, RESERVED_WORDS, RULE, is_route_name

if TYPE_CHECKING:
    from autotune.routes.base import Route

GROUP = "autotune.routes"

# name -> where it lives, and the kind of device it runs on. A route whose device is not asked for is not
# imported: a CPU run must not need a GPU library.
BUILT_IN = {
    "torch-sdpa": ("autotune.routes.torch_sdpa:TorchSdpa", "cpu"),
    "torch-splitkv": ("autotune.routes.torch_splitkv:TorchSplitKv", "cpu"),
    "xqa-decode": ("autotune.routes.flashinfer.xqa:XqaDecode", "cuda"),
    "trtllm-gen-decode": ("autotune.routes.flashinfer.trtllm_gen:TrtllmGenDecode", "cuda"),
    "trtllm-gen-decode-ragged": ("autotune.routes.flashinfer.trtllm_gen:TrtllmGenDecodeRagged", "cuda"),
    "trtllm-gen-context": ("autotune.routes.flashinfer.trtllm_gen:TrtllmGenContext", "cuda"),
    "fmha-v2": ("autotune.routes.flashinfer.fmha_v2:FmhaV2", "cuda"),
    "fa2": ("autotune.routes.flashinfer.fa_prefill:Fa2", "cuda"),
    "fa3": ("autotune.routes.flashinfer.fa_prefill:Fa3", "cuda"),
    "fa2-decode": ("autotune.routes.flashinfer.fa_decode:Fa2Decode", "cuda"),
}


class UnknownRoute(ValueError):  # noqa: N818 - a lookup's answer, named like one
    """No route has this name; the message lists those that there are."""


@dataclass(frozen=True, slots=True)
class RouteLoadError:
    """One entry point that gave no route.

    Attributes:
        name: the entry point's name.
        source: the distribution that declares it and what it points to.
        reason: why it was skipped, in one line.
    """

    name: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"route {self.name!r} from {self.source} was skipped: {self.reason}"


@dataclass(frozen=True)
class _Others:
    routes: dict[str, Route]
    errors: tuple[RouteLoadError, ...]


class _SkippedError(Exception):
    """Why an entry point gives no route."""


def routes(device: str | None = None) -> dict[str, Route]:
    """All routes by name, ours first, others in the order of their names.

    Args:
        device: ``cpu`` or ``cuda``, with or without an index: leaves out our routes for other devices.
            Others' routes say in ``supports`` what they run on. None: all.
    """
    kind = device.partition(":")[0] if device else None
    ours = {name: _built_in(name) for name, (_, made_for) in BUILT_IN.items() if kind in (None, made_for)}
    return {**ours, **_others().routes}


def is_built_in(name: str) -> bool:
    """Whether the route is one of ours; nothing is imported."""
    return name in BUILT_IN


def load_errors() -> list[RouteLoadError]:
    """The entry points that were skipped; [] if none."""
    return list(_others().errors)


def get(name: str) -> Route:
    """The route called ``name``.

    Raises:
        UnknownRoute: there is none.
    """
    if name in BUILT_IN:
        return _built_in(name)
    others = _others()
    if name not in others.routes:
        known = ", ".join(sorted([*BUILT_IN, *others.routes]))
        skipped = [str(error) for error in others.errors if error.name == name]
        raise UnknownRoute("; ".join([f"unknown route {name!r}: there are {known}", *skipped]))
    return others.routes[name]


def reload() -> None:
    """Forget what was loaded: ``sys.path`` changed, or a package was installed."""
    importlib.invalidate_caches()
    _built_in.cache_clear()
    _others.cache_clear()


@cache
def _built_in(name: str) -> Route:
    module, _, attribute = BUILT_IN[name][0].partition(":")
    made: Route = getattr(importlib.import_module(module), attribute)()
    return made


@cache
def _others() -> _Others:
    """What other packages add; none of ours is imported for it."""
    return _Others(*_foreign(entry_points(group=GROUP)))


def _foreign(points: Iterable[EntryPoint]) -> tuple[dict[str, Route], tuple[RouteLoadError, ...]]:
    found: dict[str, Route] = {}
    errors = []
    seen: set[tuple[str, str]] = set()
    for point in sorted(points, key=lambda point: (point.name, point.value)):
        # our own entry points, and a distribution that sys.path shows twice
        if (point.name, point.value) in seen or BUILT_IN.get(point.name, ("",))[0] == point.value:
            continue
        seen.add((point.name, point.value))
        try:
            if point.name in BUILT_IN:
                raise _SkippedError("the name is a built-in route's; choose another")
            if point.name in found:
                raise _SkippedError("another entry point has this name already")
            found[point.name] = _route(point)
        except _SkippedError as refusal:
            errors.append(RouteLoadError(point.name, _source(point), str(refusal)))
    return found, tuple(errors)


def _route(point: EntryPoint) -> Route:
    # a proof's job finds what is not for use where it is made, never here
    if point.name in RESERVED_WORDS or point.name.startswith(NOT_FOR_USE):
        raise _SkippedError("the name has a meaning of its own here; choose another")
    if not is_route_name(point.name):
        raise _SkippedError(f"a name is {RULE}")
    try:
        made = point.load()()
    except (Exception, SystemExit) as error:  # whatever a foreign module does when it is imported
        raise _SkippedError(f"it cannot be loaded: {_one_line(error)}") from error
    from autotune.routes.foreign import Misfit, examine

    try:
        return examine(made, point.name)
    except Misfit as refusal:
        raise _SkippedError(str(refusal)) from None
    except Exception as error:  # a property of a foreign object
        raise _SkippedError(f"it cannot be asked what it is: {_one_line(error)}") from error


def _source(point: EntryPoint) -> str:
    dist = point.dist
    return f"{dist.name} {dist.version} ({point.value})" if dist else point.value


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
