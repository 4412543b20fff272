"""Search spaces: one GPU's models, dtypes, accept lengths, batch sizes and KV rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autotune.domain.dtypes import PROFILES
from autotune.domain.identity import stable_id
from autotune.hardware.profile import DeviceProfile
from autotune.space.errors import SpaceError
from autotune.space.library import engine_names, model_file, model_names, profile_file, profiles
from autotune.space.model import LayerKind, Model, load_model, per_rank_shape
from autotune.space.reader import Section, listed, read, suggest

SCHEMA = "autotune/search-space/1"
OBJECTIVES = ("graph", "step")


@dataclass(frozen=True, slots=True)
class ModelUse:
    """One kind of attention layer of one model at one attention TP degree."""

    model: Model
    attn_tp: int
    layer_kind: LayerKind

    @property
    def label(self) -> str:
        """As the table names it: ``qwen3.5-397b-a17b @ attn_tp 4``; the kind follows where there are more."""
        label = f"{self.model.name} @ attn_tp {self.attn_tp}"
        return label if len(self.model.attention) == 1 else f"{label} ({self.layer_kind})"


@dataclass(frozen=True)
class Space:
    """A search space as its file says it, models resolved.

    Attributes:
        engines: engines it is meant for; the first is the default.
        models: each model with its attention TP degrees.
        dtypes: precision profiles, keys of ``domain.dtypes.PROFILES``.
        batch_size: captured sizes; None: those of the engine.
        eager: ``(low, high)`` intervals of batch sizes, both ends among the captured ones.
        kv_len: upper ends of the KV rows, new tokens included.
        max_context: tokens; None: the engine's.
        objectives: ``graph`` (time of ``run``) and ``step`` (host work too).
    """

    gpu: str
    device: DeviceProfile
    engines: tuple[str, ...]
    models: tuple[tuple[Model, tuple[int, ...]], ...]
    dtypes: tuple[str, ...]
    q_len: tuple[int, ...]
    batch_size: tuple[int, ...] | None
    eager: tuple[tuple[int, int], ...]
    kv_len: tuple[int, ...]
    max_context: int | None
    objectives: tuple[str, ...]
    file: Path

    def uses(self) -> list[ModelUse]:
        """Every model x attn_tp x layer kind, in file order."""
        return [
            ModelUse(model, degree, kind)
            for model, degrees in self.models
            for degree in degrees
            for kind in model.attention
        ]

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the content, the models' too; formatting and comments do not count."""
        return stable_id(
            {
                "gpu": self.gpu,
                "device": self.device.to_dict(),
                "engines": self.engines,
                "models": [[model.to_dict(), degrees] for model, degrees in self.models],
                "dtypes": self.dtypes,
                "q_len": self.q_len,
                "batch_size": self.batch_size,
                "eager": self.eager,
                "kv_len": self.kv_len,
                "max_context": self.max_context,
                "objectives": self.objectives,
            },
            16,
        )


def _device(top: Section, gpu: str) -> DeviceProfile:
    if "device" not in top:
        # a file of one's own may lean on a shipped profile
        known = profiles()
        if gpu not in known or profile_file(gpu) == top.file.resolve():
            top.fail("device", f"missing; it may be left out where gpu is one of {listed(known)}")
        return load_profile(gpu).device
    device = top.section("device")
    kind = device.text("kind", ("cpu", "cuda"))
    if kind == "cpu":
        device.only(("kind",))
        return DeviceProfile(gpu, "cpu")
    device.only(("kind", "names", "compute_capability", "sm_count", "memory_gib"))
    capability = device.text("compute_capability", example=' such as "9.0"')
    try:
        return DeviceProfile(
            name=gpu,
            kind=kind,
            names=device.texts("names"),
            compute_capability=capability,
            sm_count=device.integers("sm_count") if "sm_count" in device else (),
            memory_gib=device.integer("memory_gib") if "memory_gib" in device else 0,
        )
    except SpaceError:
        raise
    except ValueError as error:
        device.fail("compute_capability", str(error))


def _models(top: Section) -> tuple[tuple[Model, tuple[int, ...]], ...]:
    found: list[tuple[Model, tuple[int, ...]]] = []
    for item in top.sections("models", "a list of {model, attn_tp}"):
        item.only(("model", "attn_tp"))
        name = item.text("model")
        path = model_file(name, top.file)
        if path is None:
            known = model_names()
            item.fail("model", f"unknown model {name!r}{suggest(name, known)}; known: {listed(known)}")
        if any(name == model.name for model, _ in found):
            item.fail("model", f"{name!r} is there twice; list its degrees in one attn_tp")
        model, degrees = load_model(path), item.integers("attn_tp")
        for index, degree in enumerate(degrees):
            try:
                per_rank_shape(model, model.attention[0], degree, 1, "fused-nhd")
            except SpaceError as error:
                item.fail(f"attn_tp[{index}]", str(error))
        found.append((model, degrees))
    return tuple(found)


def load_file(path: Path) -> Space:
    """Read a search space from any file.

    Raises:
        SpaceError: in one line, the file, the line, the key and what is allowed there.
    """
    top = read(path)
    top.schema(SCHEMA)
    top.only(
        (
            "schema",
            "gpu",
            "device",
            "engines",
            "models",
            "dtypes",
            "q_len",
            "batch_size",
            "eager",
            "kv_len",
            "max_context",
            "objectives",
        )
    )
    gpu = top.text("gpu")
    batch_size = top.integers("batch_size") if "batch_size" in top else None
    eager = top.pairs("eager") if "eager" in top else ()
    if eager and batch_size is None:
        top.fail("eager", "needs batch_size in this file: both ends of an interval are measured there")
    for index, interval in enumerate(eager):
        for end in interval:
            if end not in (batch_size or ()):
                top.fail(f"eager[{index}]", f"{end} is not in batch_size {list(batch_size or ())}")
    q_len, kv_len = top.integers("q_len"), top.integers("kv_len")
    max_context = top.integer("max_context") if "max_context" in top else None
    if max_context is not None and kv_len[0] > max_context:
        top.fail("kv_len", f"every row is longer than max_context {max_context}")
    if q_len[-1] > kv_len[-1]:
        top.fail("q_len", f"{q_len[-1]} is longer than every KV row; the longest is {kv_len[-1]}")
    return Space(
        gpu=gpu,
        device=_device(top, gpu),
        engines=top.texts("engines", engine_names()),
        models=_models(top),
        dtypes=top.texts("dtypes", PROFILES),
        q_len=q_len,
        batch_size=batch_size,
        eager=eager,
        kv_len=kv_len,
        max_context=max_context,
        objectives=top.texts("objectives", OBJECTIVES),
        file=path,
    )


def load_profile(gpu: str) -> Space:
    """The shipped search space of ``--gpu GPU``; raises :class:`UnknownProfile` or :class:`SpaceError`."""
    path = profile_file(gpu)
    space = load_file(path)
    if space.gpu != gpu:
        raise SpaceError(f'{path}: gpu: must be the file\'s name "{gpu}", not "{space.gpu}"')
    return space


def open_space(gpu: str | None = None, file: Path | None = None) -> Space:
    """What ``--gpu`` and ``--space`` ask for together.

    Raises:
        SpaceError: neither is given, they contradict each other, or the file is malformed.
        UnknownProfile: ``gpu`` names no shipped profile and no file is given.
    """
    if file is None:
        if gpu is None:
            raise SpaceError(f"--gpu or --space is needed; --gpu takes {listed(profiles())}")
        return load_profile(gpu)
    space = load_file(file)
    if gpu is not None and gpu != space.gpu:
        raise SpaceError(f"{file}: gpu: is {space.gpu!r}, but --gpu says {gpu!r}")
    return space
