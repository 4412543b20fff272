"""Emulated routes by name: who finds them, who refuses them, what they say they support."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.cli.main import main
from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.domain.route_name import is_route_name
from autotune.routes import registry
from autotune.routes.base import Route
from autotune.routes.flashinfer.emulation import route as emulation
from autotune.routes.flashinfer.emulation.planted import MISTAKES
from autotune.routes.flashinfer.emulation.route import BASES, b200, emulated, workspace_bytes
from autotune.worker.jobs import child_route

MakeColumn = Callable[..., Column]
CPU = Facts("cpu", {"name": "a CPU", "cores": 2}, {"torch": "2.11"})
NAMES = [*(f"emulated-{base}" for base in BASES), *MISTAKES]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer looks installed."""
    monkeypatch.setattr(emulation, "flashinfer_facts", lambda: {"flashinfer": "0.7.2"})


@pytest.mark.parametrize("name", NAMES)
def test_a_child_finds_it_by_name_and_nobody_else_does(name: str) -> None:
    found = child_route(name)
    assert isinstance(found, Route) and found.name == name
    assert (
        name not in registry.BUILT_IN and name not in registry.routes() and name not in registry.routes("cpu")
    )
    with pytest.raises(registry.UnknownRoute):
        registry.get(name)
    # no table can be written or read that names it
    assert not is_route_name(name)


def test_names_end_in_the_route_s_own() -> None:
    assert {name.rpartition("-in-")[2] for name in MISTAKES} == set(BASES)
    assert all(MISTAKES[name].base == name.rpartition("-in-")[2] for name in MISTAKES)
    with pytest.raises(ValueError, match="no emulated route is called 'emulated-xqa-decode'; there are"):
        emulated("emulated-xqa-decode")


@pytest.fixture
def shameless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that offers the emulated decode route to every run."""
    info = tmp_path / "shameless-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shameless\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{registry.GROUP}]\nemulated-trtllm-gen-decode = shameless:route\n"
    )
    (tmp_path / "shameless.py").write_text(
        "from autotune.routes.flashinfer.emulation.route import emulated\n"
        "def route():\n    return emulated('emulated-trtllm-gen-decode')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry.reload()
    yield
    monkeypatch.undo()
    registry.reload()


@pytest.mark.usefixtures("shameless")
def test_no_package_can_offer_one_to_a_run() -> None:
    assert "emulated-trtllm-gen-decode" not in registry.routes()
    (error,) = registry.load_errors()
    assert str(error) == (
        "route 'emulated-trtllm-gen-decode' from shameless 1.0 (shameless:route) was skipped: "
        "the name has a meaning of its own here; choose another"
    )


def test_run_refuses_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["run", "--gpu", "cpu", "--routes", "emulated-trtllm-gen-decode", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--db", f"sqlite:///{tmp_path}/x.db"])
    assert ended.value.code == 2
    assert "--routes emulated-trtllm-gen-decode: there are torch-sdpa" in capsys.readouterr().err
    assert list(tmp_path.glob("*.yaml")) == []


def test_it_behaves_as_the_route_it_stands_for() -> None:
    for name, base in BASES.items():
        found = emulated(f"emulated-{name}")
        assert (found.family, found.needs, found.version) == (base.family, base.needs, base.version)
        assert found.deterministic is base.deterministic


@pytest.mark.usefixtures("library")
def test_it_supports_on_a_cpu_what_the_route_supports_on_a_b200(make_column: MakeColumn) -> None:
    route = emulated("emulated-trtllm-gen-context")
    b200_facts = b200(CPU)
    assert (b200_facts.device, b200_facts.hardware["compute_capability"]) == ("cpu", "10.0")
    assert b200_facts.hardware["sm_count"] == 148 and b200_facts.hardware["cores"] == 2
    assert route.supports(make_column(), CPU) is None
    assert route.supports(make_column(kv="e4m3"), CPU) is None
    assert route.supports(make_column(soft_cap=30.0), CPU) == "trtllm-gen has no logits soft cap"
    assert route.supports(make_column(heads=(8, 1, 80)), CPU) is not None
    # NVFP4's V scales are stored as the trial's facts say
    nvfp4 = make_column(kv="nvfp4", layout="fused-hnd")
    assert "the trial needs the facts of emulation.route.b200" in str(route.supports(nvfp4, CPU))
    assert route.supports(nvfp4, b200_facts) is None
    on_gpu = Facts("cuda", {"compute_capability": "10.0"}, {"flashinfer": "0.7.2"})
    assert route.supports(make_column(), on_gpu) == "an emulation runs on the CPU, not on cuda"
    arithmetic = route.arithmetic(make_column(kv="e4m3"), CPU)
    assert (arithmetic.query, arithmetic.weights) == ("e4m3", "e4m3")


def test_it_says_that_flashinfer_is_missing(make_column: MakeColumn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "flashinfer_facts", lambda: {"flashinfer": None})
    said = emulated("emulated-trtllm-gen-decode").supports(make_column(), CPU)
    assert said == "FlashInfer is not installed: its Python layer is what an emulation runs"


def test_the_scratch_holds_every_launch(make_column: MakeColumn) -> None:
    from autotune.routes.flashinfer.emulation.params import splits

    for heads in ((8, 1, 128), (32, 2, 256), (64, 64, 64), (8, 8, 512)):
        column = make_column(heads=heads, context=131072)
        for batch in (1, 3, 8, 40, 148, 500):
            for q_len in (1, 4, 8):
                parts = splits(batch, heads[1], q_len, 131072, 148)
                used = batch * heads[0] * q_len * parts * (2 + heads[2]) * 4
                assert parts == 1 or used <= workspace_bytes(column)
