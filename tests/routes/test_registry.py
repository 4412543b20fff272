"""Which routes there are, and what becomes of entry points that give none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from autotune.domain.route_name import is_route_name
from autotune.routes import registry
from autotune.routes.base import Need
from autotune.routes.foreign import ForeignRoute, examine

ROUTE = """
from autotune.routes.base import Capture, Family, Need

class Good:
    name = "{name}"
    family = Family.DECODE
    capture = Capture.NO
    needs = frozenset({{Need.UNIFORM_Q_LEN}})
    deterministic = True
    version = 1
    def supports(self, column, facts):
        return None
    def open(self, capacity, allocate):
        raise NotImplementedError
"""


class Site:
    """A folder on ``sys.path`` that looks as pip leaves it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, dist: str, source: str, entry_points: dict[str, str]) -> None:
        module = dist.replace("-", "_")
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{module}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 2.0\n")
        lines = "".join(f"{name} = {target}\n" for name, target in entry_points.items())
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{lines}")
        registry.reload()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    registry.reload()
    yield Site(tmp_path)
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    monkeypatch.undo()
    registry.reload()


def test_ours_are_there_first_and_without_errors() -> None:
    assert list(registry.routes())[:2] == ["torch-sdpa", "torch-splitkv"]
    assert {name: route.name for name, route in registry.routes("cpu").items()}["torch-sdpa"] == "torch-sdpa"
    assert registry.get("torch-splitkv").name == "torch-splitkv"


def test_a_route_for_another_device_is_left_out() -> None:
    assert "torch-sdpa" in registry.routes("cpu:0")
    assert "torch-sdpa" not in registry.routes("cuda")


def test_every_built_in_route_calls_itself_what_it_is_listed_as() -> None:
    for name, route in registry.routes().items():
        if name in registry.BUILT_IN:
            assert examine(route, name).made is route
            assert is_route_name(name)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        registry.UnknownRoute, match=r"unknown route 'xqa': there are .*torch-sdpa, torch-split"
    ):
        registry.get("xqa")


def test_a_foreign_route_is_found(site: Site) -> None:
    site.add("other-kernels", ROUTE.format(name="other-decode"), {"other-decode": "other_kernels:Good"})
    assert registry.get("other-decode").name == "other-decode"
    assert list(registry.routes("cuda"))[-1] == "other-decode"
    assert registry.load_errors() == []


FICKLE = """
from itertools import count
from autotune.routes.base import Capture, Family, Need

class Good:
    name = "fickle-decode"
    capture = Capture.NO
    deterministic = True
    times = count()
    asked = []
    @property
    def family(self):
        return (Family.CONTEXT, Family.DECODE)[next(self.times) % 2]
    @property
    def needs(self):
        self.asked.append("needs")
        return frozenset({Need.HOST_KV_LENS}) if len(self.asked) == 1 else frozenset()
    @property
    def version(self):
        return next(self.times)
    def supports(self, column, facts):
        return f"{self.name} was asked about {column}"
    def open(self, capacity, allocate):
        return capacity, allocate
"""


def test_what_a_route_says_of_itself_is_read_once(site: Site) -> None:
    site.add("fickle-kernels", FICKLE, {"fickle-decode": "fickle_kernels:Good"})
    route = cast(Any, registry.get("fickle-decode"))
    said = [(route.family, route.needs, route.version) for _ in range(3)]
    assert said[0][1] == {Need.HOST_KV_LENS}
    assert said == [said[0]] * 3
    with pytest.raises(AttributeError):
        route.version = 7
    assert route.supports("a column", None) == "fickle-decode was asked about a column"
    assert route.open(1, 2) == (1, 2)
    assert registry.routes("cpu")["fickle-decode"] is route


def test_what_was_handed_out_is_a_copy() -> None:
    registry.routes().clear()
    assert "torch-sdpa" in registry.routes()


BAD = [
    (
        "raise RuntimeError('no GPU here\\nreally')",
        "x-route",
        "Good",
        "cannot be loaded: RuntimeError: no GPU",
    ),
    ("import nothing_of_this_name", "x-route", "Good", "cannot be loaded: ModuleNotFoundError"),
    ("raise SystemExit(3)", "x-route", "Good", "cannot be loaded: SystemExit: 3"),
    ("x = 1", "x-route", "Good", "cannot be loaded: AttributeError"),
    ("class Good:\n  def __init__(self, device): pass", "x-route", "Good", "cannot be loaded: TypeError"),
    ("class Good: pass", "x-route", "Good", "it has no 'name'"),
    (ROUTE.format(name="y-route"), "x-route", "Good", "calls itself 'y-route'"),
    (ROUTE.format(name="x-route").replace("Family.DECODE", "'decode'"), "x-route", "Good", "not a Family"),
    (ROUTE.format(name="x-route").replace("Capture.NO", "'no'"), "x-route", "Good", "not a Capture"),
    (ROUTE.format(name="x-route").replace("= 1", "= '1'"), "x-route", "Good", "version is '1'"),
    (ROUTE.format(name="x-route").replace("= True", "= 1"), "x-route", "Good", "deterministic is 1"),
    (ROUTE.format(name="x-route").replace("frozenset({", "set({"), "x-route", "Good", "frozenset of Need"),
    (ROUTE.format(name="x-route").replace("capacity, allocate", ""), "x-route", "Good", "open does not take"),
    (ROUTE.format(name="torch-sdpa"), "torch-sdpa", "Good", "a built-in route's"),
    (ROUTE.format(name="fallback"), "fallback", "Good", "a meaning of its own"),
    (ROUTE.format(name="any"), "any", "Good", "a meaning of its own"),
    (ROUTE.format(name="planted-x"), "planted-x", "Good", "a meaning of its own"),
    (ROUTE.format(name="x" * 65), "x" * 65, "Good", "at most 64"),
    (ROUTE.format(name="X_Route"), "X_Route", "Good", "lower-case letters and digits"),
    (
        "class Good:\n  @property\n  def name(self): raise KeyError('late')",
        "x-route",
        "Good",
        "cannot be asked what it is: KeyError: 'late'",
    ),
]


@pytest.mark.parametrize(("source", "name", "attribute", "reason"), BAD)
def test_a_bad_entry_point_is_one_clear_line_and_stops_nothing(
    site: Site, source: str, name: str, attribute: str, reason: str
) -> None:
    site.add("good-kernels", ROUTE.format(name="good-decode"), {"good-decode": "good_kernels:Good"})
    site.add("bad-kernels", source, {name: f"bad_kernels:{attribute}"})
    assert {"torch-sdpa", "torch-splitkv", "good-decode"} <= set(registry.routes())
    assert type(registry.get("torch-sdpa")).__module__ == "autotune.routes.torch_sdpa"
    (error,) = registry.load_errors()
    assert reason in error.reason
    assert str(error).startswith(f"route {name!r} from bad-kernels 2.0 (bad_kernels:Good) was skipped: ")
    assert "\n" not in str(error)


def test_an_unknown_name_that_was_skipped_says_why(site: Site) -> None:
    site.add("bad-kernels", "raise RuntimeError('no GPU here')", {"bad-decode": "bad_kernels:Good"})
    with pytest.raises(registry.UnknownRoute, match=r"'bad-decode'.*was skipped.*no GPU here"):
        registry.get("bad-decode")


def test_two_packages_of_one_name(site: Site) -> None:
    for dist in ("a-kernels", "b-kernels"):
        site.add(dist, ROUTE.format(name="same"), {"same": f"{dist.replace('-', '_')}:Good"})
    same = registry.get("same")
    assert isinstance(same, ForeignRoute)
    assert type(same.made).__module__ == "a_kernels"
    (error,) = registry.load_errors()
    assert "another entry point has this name" in error.reason and "b-kernels" in error.source


def test_our_own_entry_points_are_not_foreign(site: Site) -> None:
    points = {name: target for name, (target, _) in registry.BUILT_IN.items()}
    site.add("kernel-autotune-copy", "", points)
    assert registry.load_errors() == []


def test_importing_the_registry_imports_neither_torch_nor_a_route() -> None:
    code = (
        "import sys, autotune.routes.registry\n"
        "found = {'torch', 'numpy', 'autotune.routes.torch_sdpa'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_what_another_device_needs_is_not_imported_for_this_one() -> None:
    code = (
        "import sys; from autotune.routes import registry\n"
        "registry.load_errors(); registry.routes('cuda')\n"
        "found = {'torch', 'flashinfer'} & set(sys.modules); sys.exit(str(found) if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
