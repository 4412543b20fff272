"""Serving engines: what they offer a route, how they lay out memory, which routes they can call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.domain.identity import stable_id
from autotune.domain.shape import KvLayout
from autotune.space.errors import SpaceError
from autotune.space.library import engine_file
from autotune.space.reader import Section, listed, read

SCHEMA = "autotune/engine/1"

# The values of ``routes.base.Need``, which lies above this package; a test holds them equal.
NEEDS = ("host_kv_lens", "uniform_q_len")

MODES = ("graph", "eager")
_LAYOUTS = tuple(layout.value for layout in KvLayout)
_ARCHITECTURES = ("cpu", "sm90", "sm100", "sm103", "sm120")


@dataclass(frozen=True, slots=True)
class Architecture:
    """An engine on one architecture.

    Attributes:
        mode: ``graph`` (captured sizes) or ``eager``.
        fallback: context routes in order; the first that supports a workload answers for everything unproven.
        stock: what this version of the engine calls without a table.
        deployable: routes that compete in the engine's table; others are measured and shown as advice.
    """

    mode: str
    fallback: tuple[str, ...]
    stock: str
    deployable: tuple[str, ...]
    kv_layout: str
    page_size: int


@dataclass(frozen=True)
class Engine:
    """An engine profile.

    Attributes:
        offers: values of ``routes.base.Need`` that a route may rely on.
        pad_value: KV length of the rows that pad a replayed graph to its captured size.
        max_context: tokens, where the search space says nothing else.
        capture_sizes: batch sizes, where the search space says nothing else.
        workspace_bytes: the attention workspace that the engine allocates.
        third_party: whether routes that other packages register may be deployed too.
    """

    name: str
    offers: frozenset[str]
    pad_value: int
    max_context: int
    capture_sizes: tuple[int, ...]
    workspace_bytes: int
    architectures: dict[str, Architecture]
    third_party: bool = False

    def on(self, arch: str) -> Architecture:
        """The engine on ``cpu``, ``sm90`` and the like; raises :class:`SpaceError` if it is not there."""
        if arch not in self.architectures:
            raise SpaceError(
                f"--engine {self.name}: has no profile for {arch}; it has {listed(self.architectures)}"
            )
        return self.architectures[arch]

    def fallback(self, arch: str) -> tuple[str, ...]:
        """Context routes in order of preference."""
        return self.on(arch).fallback

    def stock(self, arch: str) -> str:
        """What the engine calls without a table."""
        return self.on(arch).stock

    def deployable(self, arch: str) -> tuple[str, ...]:
        """Routes that compete in the engine's table."""
        return self.on(arch).deployable

    def can_deploy(self, arch: str, route: str, *, built_in: bool) -> bool:
        """Whether ``route`` may compete in the engine's table; ``built_in``: it is not a third party's."""
        return route in self.deployable(arch) or (self.third_party and not built_in)

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the content, not its formatting."""
        data: dict[str, Any] = {
            "name": self.name,
            "offers": sorted(self.offers),
            "pad_value": self.pad_value,
            "max_context": self.max_context,
            "capture_sizes": self.capture_sizes,
            "workspace_bytes": self.workspace_bytes,
            "third_party": self.third_party,
            "architectures": {
                name: [arch.mode, arch.fallback, arch.stock, arch.deployable, arch.kv_layout, arch.page_size]
                for name, arch in self.architectures.items()
            },
        }
        return stable_id(data, 16)


def _architecture(item: Section, kv_layout: str, page_size: int) -> Architecture:
    item.only(("mode", "fallback", "stock", "deployable", "kv_layout", "page_size"))
    deployable, fallback = item.texts("deployable"), item.texts("fallback")
    if not set(fallback) & set(deployable):
        item.fail("fallback", f"names no deployable route; deployable: {listed(deployable)}")
    return Architecture(
        mode=item.text("mode", MODES),
        fallback=fallback,
        stock=item.text("stock", deployable),
        deployable=deployable,
        kv_layout=item.text("kv_layout", _LAYOUTS) if "kv_layout" in item else kv_layout,
        page_size=item.integer("page_size") if "page_size" in item else page_size,
    )


def load_engine(name_or_file: str | Path) -> Engine:
    """A shipped engine by name, or any engine file by ``Path``; raises :class:`SpaceError`."""
    path = name_or_file if isinstance(name_or_file, Path) else engine_file(name_or_file)
    top = read(path)
    top.schema(SCHEMA)
    top.only(
        (
            "schema",
            "name",
            "offers",
            "kv_layout",
            "page_size",
            "pad_value",
            "max_context",
            "capture_sizes",
            "workspace_bytes",
            "third_party",
            "architectures",
        )
    )
    name = top.text("name")
    if name != path.stem:
        top.fail("name", f'must be the file\'s name "{path.stem}", not "{name}"')
    kv_layout, page_size = top.text("kv_layout", _LAYOUTS), top.integer("page_size")
    table = top.section("architectures")
    table.only(_ARCHITECTURES)
    if not table.keys():
        top.fail("architectures", f"must name at least one of {listed(_ARCHITECTURES)}")
    return Engine(
        name=name,
        offers=frozenset(top.texts("offers", NEEDS)),
        pad_value=top.integer("pad_value", least=0),
        max_context=top.integer("max_context"),
        capture_sizes=top.integers("capture_sizes"),
        workspace_bytes=top.integer("workspace_bytes", least=0),
        third_party=top.boolean("third_party") if "third_party" in top else False,
        architectures={
            arch: _architecture(table.section(arch), kv_layout, page_size)
            for arch in table.keys()  # noqa: SIM118
        },
    )
