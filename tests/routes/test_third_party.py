"""The template in docs/third-party-route.md, taken from the page itself and put where pip would put it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autotune.arena.base import Placement
from autotune.arena.host_mmap import HostMmapArena
from autotune.arena.operands import Recipe, build, capacity_of
from autotune.domain.cell import Column
from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.route_name import NOT_FOR_USE, RESERVED_WORDS
from autotune.domain.shape import Shape
from autotune.routes import registry
from autotune.routes.base import Route
from autotune.routes.foreign import ForeignRoute

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

DOC = Path(__file__).parents[2] / "docs" / "third-party-route.md"
PACKAGE = "example_attention_route"
CPU = Facts("cpu", {}, {})

torch.set_num_threads(1)


def block(heading: str, language: str) -> str:
    """The code block under a heading of the page."""
    found = re.search(
        rf"^## `{re.escape(heading)}`\n+```{language}\n(.*?)^```$", DOC.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found, f"{DOC.name} has no {language} block under {heading}"
    return found.group(1)


def test_the_page_names_every_name_that_is_taken() -> None:
    text = DOC.read_text()
    for word in (*RESERVED_WORDS, *NOT_FOR_USE):
        assert f"`{word}`" in text


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Installs the template; gives the name of its route."""
    project = tomllib.loads(block("pyproject.toml", "toml"))["project"]
    entry_points = project["entry-points"][registry.GROUP]
    source = tmp_path / PACKAGE / "__init__.py"
    source.parent.mkdir()
    source.write_text(block(f"{PACKAGE}/__init__.py", "python"))
    info = tmp_path / f"{PACKAGE}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = "".join(f"{name} = {target}\n" for name, target in entry_points.items())
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{lines}")
    (info / "RECORD").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    registry.reload()
    yield next(iter(entry_points))
    sys.modules.pop(PACKAGE, None)
    monkeypatch.undo()
    registry.reload()


def case(dtype: str = "fp32") -> Column:
    return Column(Shape(8, 2, 64, 16), DTypes(dtype, dtype, dtype), 4, 3, 256)


def test_the_template_is_found_beside_ours(installed: str) -> None:
    assert registry.load_errors() == []
    assert {"torch-sdpa", "torch-splitkv", installed} <= set(registry.routes("cpu"))
    route = registry.get(installed)
    assert isinstance(route, Route)
    assert isinstance(route, ForeignRoute)
    assert type(route.made).__module__ == PACKAGE


def test_it_says_what_it_does_not_support(installed: str) -> None:
    route = registry.get(installed)
    assert route.supports(case(), CPU) is None
    assert route.supports(case("bf16"), CPU) == "takes fp32 only"
    assert route.supports(case(), Facts("cuda", {}, {})) == "runs on the CPU only, not on cuda"


@pytest.mark.parametrize("placement", Placement)
def test_it_gives_what_the_fallback_gives(installed: str, placement: Placement) -> None:
    results = []
    with HostMmapArena(placement) as arena:
        operands = build(arena, case(), Recipe((100, 1, 256), 7, table_garbage=-1), "cpu")
        capacity = capacity_of(case(), operands.recipe, "cpu")
        for name in (installed, "torch-sdpa"):
            session = registry.get(name).open(
                capacity, lambda name, shape, dtype: arena.tensor(name, shape, dtype)
            )
            session.prepare(operands.step)
            operands.out.fill_(float("nan"))
            session.run(operands.out)
            results.append(operands.out.clone())
            session.close()
        assert arena.overwritten() == []
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=2e-5)


def test_it_is_gone_when_it_is_uninstalled() -> None:
    with pytest.raises(registry.UnknownRoute, match="example-matmul"):
        registry.get("example-matmul")
