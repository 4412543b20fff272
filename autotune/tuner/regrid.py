"""A search space of some of a table's cells: as its run had them, without the files that it was run from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.domain.dtypes import PROFILES
from autotune.hardware.profile import DeviceProfile
from autotune.space.grid import Entry, Grid
from autotune.space.library import model_file
from autotune.space.model import LayerKind, Model, load_model
from autotune.space.space import OBJECTIVES, ModelUse, Space
from autotune.table.errors import TableError
from autotune.tuner.objectives import STEP

if TYPE_CHECKING:
    from autotune.domain.cell import Column
    from autotune.domain.dtypes import DTypes
    from autotune.domain.fingerprint import Facts
    from autotune.space.engine import Engine
    from autotune.table.model import Entry as TableEntry
    from autotune.table.model import Policy, RoutingTable
    from autotune.tuner.answered import Answered

# The name of such a study in its database; a run's is its profile's.
NAME = "verify"

_LABEL = re.compile(r"(?P<model>\S+) @ attn_tp (?P<degree>[1-9]\d{0,5})(?: \((?P<kind>[a-z]+(?: \d+)?)\))?")


def regrid(table: RoutingTable, sample: Sequence[Answered], engine: Engine, file: Path) -> Grid:
    """Exactly the cells of ``sample``, under the table's objective, engine and pad value.

    Args:
        file: the table's; model files may lie in ``models/`` beside it.

    Raises:
        TableError: the objective is one that this version does not know, or counts the layers of a model
            that is not known here.
    """
    policy = table.policy
    if policy.objective not in OBJECTIVES:
        raise TableError("policy.objective", f"{policy.objective!r} is not one of {', '.join(OBJECTIVES)}")
    columns: dict[Column, list[Answered]] = {}
    for place in sample:
        columns.setdefault(place.cell.column, []).append(place)
    entries = tuple(
        Entry(
            shape=column.shape,
            profile=_profile(column.dtypes),
            dtypes=column.dtypes,
            q_len=column.q_len,
            max_context=column.max_context,
            uses=_uses(places[0].entry, policy, file),
            columns=(column,),
            rows=tuple((place.cell.kv_low, place.cell.kv_high) for place in places),
            intervals=(column.interval,) if column.interval else (),
        )
        for column, places in columns.items()
    )
    space = Space(
        gpu=NAME,
        device=_device(table.facts),
        engines=(engine.name,),
        models=(),
        dtypes=tuple(dict.fromkeys(entry.profile for entry in entries)),
        q_len=tuple(sorted({entry.q_len for entry in entries})),
        batch_size=None,
        eager=(),
        kv_len=tuple(sorted({high for entry in entries for _, high in entry.rows})),
        max_context=None,
        objectives=(policy.objective,),
        file=file,
    )
    return Grid(space, replace(engine, pad_value=policy.pad_value), entries)


def _device(facts: Facts) -> DeviceProfile:
    if facts.device == "cpu":
        return DeviceProfile(NAME, "cpu")
    hardware = facts.hardware
    return DeviceProfile(NAME, "cuda", (str(hardware["name"]),), str(hardware["compute_capability"]))


def _profile(dtypes: DTypes) -> str:
    named = next((name for name, known in PROFILES.items() if known == dtypes), None)
    return named or f"{dtypes.q}/{dtypes.kv}/{dtypes.out}"


def _uses(entry: TableEntry, policy: Policy, file: Path) -> tuple[ModelUse, ...]:
    """The entry's models by name; of the rest only the layers count, and those only for ``step``."""
    return tuple(_use(label, entry, policy, file) for label in entry.models or ("(no model)",))


def _use(label: str, entry: TableEntry, policy: Policy, file: Path) -> ModelUse:
    found = _LABEL.fullmatch(label)
    name, degree = (found["model"], int(found["degree"])) if found else (label, 1)
    layers = policy.layers or (_layers(label, found, file) if policy.objective == STEP else 1)
    shape = entry.shape
    window = shape.window_left + 1
    kind = LayerKind("sliding" if window else "full", layers, window)
    model = Model(
        name=name,
        num_attention_heads=shape.num_qo_heads * degree,
        num_kv_heads=shape.num_kv_heads * degree,
        head_dim=shape.head_dim,
        attention=(kind,),
        sinks=shape.sinks,
        soft_cap=shape.soft_cap,
    )
    return ModelUse(model, degree, kind)


def _layers(label: str, found: re.Match[str] | None, file: Path) -> int:
    path = model_file(found["model"], file) if found else None
    if found is not None and path is not None:
        kinds = load_model(path).attention
        for kind in kinds:
            if found["kind"] in (None, str(kind)):
                return kind.layers
    raise TableError(
        "policy.objective",
        f"step counts the layers of {label!r}, which is not known here; put its file into "
        f"{file.resolve().parent / 'models'}, or export the table with --layers",
    )
