"""From parsed YAML to the model: keys and types, nothing about what they mean together.

Every mapping has exactly its known keys: a key that this version does not know could be a restriction,
and a table that is misread in one place is not used at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, TypeVar, cast

from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import HARDWARE_KEYS, SOFTWARE_KEYS, Facts, Scalar
from autotune.domain.shape import Shape
from autotune.table.errors import TableError, show
from autotune.table.model import (
    SCHEMA,
    SCHEMA_FAMILY,
    SCHEMA_VERSION,
    Eager,
    Entry,
    Generated,
    Grid,
    Policy,
    Proof,
    Quarantine,
    Ratio,
    RoutingTable,
    Row,
    Speedup,
    Unsafe,
)

T = TypeVar("T")
Raw = dict[str, Any]

_SHAPE_KEYS = {
    "num_qo_heads": int,
    "num_kv_heads": int,
    "head_dim": int,
    "page_size": int,
    "head_dim_vo": int,
    "kv_layout": str,
    "window_left": int,
    "sinks": bool,
    "soft_cap": float,
    "mask": str,
}


def table_from(data: object, digest: str) -> RoutingTable:
    """The table that ``data`` (as ``strict_yaml.parse`` returns it) spells.

    Raises:
        TableError: another schema, a missing or unknown key, or a value of the wrong type.
    """
    if not isinstance(data, dict):
        raise TableError("top level", f"must be a mapping, not {_kind(data)}")
    _check_schema(data.get("schema"))
    top = _mapping(
        data,
        "top level",
        (
            *("schema", "generated", "hardware", "software", "policy", "legend"),
            *("families", "entries", "unsafe", "quarantine"),
        ),
    )
    generated, facts = _generated_and_facts(top)
    return RoutingTable(
        generated=generated,
        facts=facts,
        policy=_policy(top["policy"]),
        legend=_strings_by_name(top["legend"], "legend"),
        families=_strings_by_name(top["families"], "families"),
        entries=_each(top["entries"], "entries", _entry),
        unsafe=_each(top["unsafe"], "unsafe", _unsafe),
        quarantine=_each(top["quarantine"], "quarantine", _quarantine),
        schema=top["schema"],
        digest=digest,
    )


def _check_schema(schema: object) -> None:
    if schema == SCHEMA:
        return
    version = schema[len(SCHEMA_FAMILY) :] if isinstance(schema, str) else ""
    if isinstance(schema, str) and schema.startswith(SCHEMA_FAMILY) and version.isdecimal():
        if int(version[:9]) > SCHEMA_VERSION:
            raise TableError("schema", f"{show(schema)} is newer than this autotune reads; upgrade autotune")
        raise TableError("schema", f"{show(schema)} is no longer read; export the table again")
    raise TableError("schema", f"must be {SCHEMA!r}, not {show(schema)}")


def _generated_and_facts(top: Raw) -> tuple[Generated, Facts]:
    generated = _mapping(top["generated"], "generated", ("by", "at", "study", "informative"))
    if not isinstance(top["hardware"], dict):
        raise TableError("hardware", f"must be a mapping, not {_kind(top['hardware'])}")
    device = top["hardware"].get("device")
    if not isinstance(device, str) or device not in HARDWARE_KEYS:
        raise TableError("hardware.device", f"must be one of {sorted(HARDWARE_KEYS)}, not {show(device)}")
    hardware = _mapping(top["hardware"], "hardware", ("device", *HARDWARE_KEYS[device]))
    software = _mapping(top["software"], "software", SOFTWARE_KEYS[device])
    informative = generated["informative"]
    if not isinstance(informative, dict):
        raise TableError("generated.informative", f"must be a mapping, not {_kind(informative)}")
    facts = Facts(
        device,
        {key: _scalar(hardware[key], f"hardware.{key}") for key in HARDWARE_KEYS[device]},
        {key: _scalar(software[key], f"software.{key}") for key in SOFTWARE_KEYS[device]},
        {key: _scalar(value, f"generated.informative.{key}") for key, value in informative.items()},
    )
    texts = {name: _text(generated[name], f"generated.{name}") for name in ("by", "at", "study")}
    return Generated(**texts), facts


def _policy(raw: object) -> Policy:
    keys = ("engine", "stock", "objective", "margin", "tau", "any_false_claim", "pad_value")
    data = _mapping(raw, "policy", keys, optional=("layers", "hidden_prepare"))
    return Policy(
        engine=_text(data["engine"], "policy.engine"),
        stock=None if data["stock"] is None else _text(data["stock"], "policy.stock"),
        objective=_text(data["objective"], "policy.objective"),
        margin=_number(data["margin"], "policy.margin"),
        tau=_maybe(data["tau"], "policy.tau", _number),
        any_false_claim=_number(data["any_false_claim"], "policy.any_false_claim"),
        pad_value=_integer(data["pad_value"], "policy.pad_value"),
        layers=_integer(data["layers"], "policy.layers") if "layers" in data else None,
        hidden_prepare=(
            _number(data["hidden_prepare"], "policy.hidden_prepare") if "hidden_prepare" in data else None
        ),
    )


def _entry(raw: object, place: str) -> Entry:
    required = (
        *("shape", "dtypes", "models", "fallback", "max_context", "q_len"),
        *("batch_size", "routes", "speedup", "proof"),
    )
    data = _mapping(raw, place, required, optional=("eager", "fallback_requires"))
    routes = _grid(data["routes"], f"{place}.routes")
    return Entry(
        shape=shape_from(data["shape"], f"{place}.shape"),
        dtypes=dtypes_from(data["dtypes"], f"{place}.dtypes"),
        models=_each(data["models"], f"{place}.models", _text),
        fallback=_text(data["fallback"], f"{place}.fallback"),
        max_context=_integer(data["max_context"], f"{place}.max_context"),
        q_len=_integer(data["q_len"], f"{place}.q_len"),
        batch_size=_each(data["batch_size"], f"{place}.batch_size", _integer),
        routes=routes,
        speedup=_speedup(data["speedup"], routes, f"{place}.speedup"),
        proof=_proofs(data["proof"], f"{place}.proof"),
        eager=_eager(data["eager"], f"{place}.eager") if "eager" in data else None,
        fallback_requires=(
            _each(data["fallback_requires"], f"{place}.fallback_requires", _text)
            if "fallback_requires" in data
            else None
        ),
    )


def _eager(raw: object, place: str) -> Eager:
    data = _mapping(raw, place, ("batch_size", "routes", "speedup"))
    routes = _grid(data["routes"], f"{place}.routes")
    return Eager(
        intervals=_each(data["batch_size"], f"{place}.batch_size", _interval),
        routes=routes,
        speedup=_speedup(data["speedup"], routes, f"{place}.speedup"),
    )


def _interval(raw: object, place: str) -> tuple[int, int]:
    ends = _each(raw, place, _integer)
    if len(ends) != 2:
        raise TableError(place, f"must be [low, high], not {show(raw)}")
    return ends[0], ends[1]


def _grid(raw: object, place: str) -> Grid:
    if not isinstance(raw, dict):
        raise TableError(place, f"must be a mapping of rows, not {_kind(raw)}")
    if "any" not in raw:
        raise TableError(place, 'key "any" is missing')
    rows = tuple(
        Row(_row_end(key, place), _text(letters, f'{place}["{key}"]'))
        for key, letters in raw.items()
        if key != "any"
    )
    return Grid(rows, _text(raw["any"], f'{place}["any"]'))


def _row_end(key: str, place: str) -> int:
    # ASCII digits in canonical form only: "01024" would be a second spelling of one row.
    if key.isascii() and key.isdecimal() and len(key) <= 18 and key == str(int(key)):
        return int(key)
    raise TableError(place, f"row {show(key)} is not a KV length in tokens")


def _speedup(raw: object, grid: Grid, place: str) -> Speedup:
    data = _mapping(raw, place, ("low", "vs_stock"))
    ends = tuple(str(row.kv_high) for row in grid.rows)
    return Speedup(*(_ratios(data[name], ends, f"{place}.{name}") for name in ("low", "vs_stock")))


def _ratios(raw: object, ends: tuple[str, ...], place: str) -> tuple[tuple[Ratio, ...], ...]:
    rows = _mapping(raw, place, ends)
    return tuple(_ratio_row(rows[end], place, end) for end in ends)


def _ratio_row(raw: object, place: str, end: str) -> tuple[Ratio, ...]:
    # Most of a table's values: looked at as a row, and one by one only to say which is wrong.
    if type(raw) is list and all(
        value is None or (type(value) is float and isfinite(value)) for value in raw
    ):
        return tuple(raw)
    return _each(raw, f'{place}["{end}"]', _ratio)


def _ratio(raw: object, place: str) -> Ratio:
    return None if raw is None else _number(raw, place)


def _proofs(raw: object, place: str) -> tuple[Proof, ...]:
    if not isinstance(raw, dict):
        raise TableError(place, f"must be a mapping from routes, not {_kind(raw)}")
    return tuple(_proof(route, block, f"{place}.{route}") for route, block in raw.items())


def _proof(route: str, raw: object, place: str) -> Proof:
    keys = ("checks", "launches", "worst_error", "fallback_error", "requires", "limits")
    data = _mapping(raw, place, keys)
    return Proof(
        route=route,
        checks=_integer(data["checks"], f"{place}.checks"),
        launches=_integer(data["launches"], f"{place}.launches"),
        worst_error=_number(data["worst_error"], f"{place}.worst_error"),
        fallback_error=_number(data["fallback_error"], f"{place}.fallback_error"),
        requires=_each(data["requires"], f"{place}.requires", _text),
        limits=_each(data["limits"], f"{place}.limits", _text),
    )


def _unsafe(raw: object, place: str) -> Unsafe:
    data = _mapping(raw, place, ("route", "cell", "kind", "detail", "repro"))
    return Unsafe(
        route=_text(data["route"], f"{place}.route"),
        cell=_text(data["cell"], f"{place}.cell"),
        kind=_text(data["kind"], f"{place}.kind"),
        detail=_string(data["detail"], f"{place}.detail"),
        repro=_string(data["repro"], f"{place}.repro"),
    )


def _quarantine(raw: object, place: str) -> Quarantine:
    keys = ("route", "reason", "at", "shape", "dtypes", "q_len", "batch_size")
    data = _mapping(raw, place, keys)
    return Quarantine(
        route=_text(data["route"], f"{place}.route"),
        reason=_text(data["reason"], f"{place}.reason"),
        at=_text(data["at"], f"{place}.at"),
        shape=_maybe(data["shape"], f"{place}.shape", shape_from),
        dtypes=_maybe(data["dtypes"], f"{place}.dtypes", dtypes_from),
        q_len=_maybe(data["q_len"], f"{place}.q_len", _integer),
        batch_size=_maybe(data["batch_size"], f"{place}.batch_size", _integer),
    )


def shape_from(raw: object, place: str) -> Shape:
    """A shape with every feature spelled out: a default that changes later must not change a table."""
    data = _mapping(raw, place, tuple(_SHAPE_KEYS))
    for key, kind in _SHAPE_KEYS.items():
        value = data[key]
        if kind is float:
            _number(value, f"{place}.{key}")
        elif type(value) is not kind:
            raise TableError(f"{place}.{key}", f"must be {kind.__name__}, not {show(value)}")
    if data["head_dim_vo"] <= 0:
        raise TableError(f"{place}.head_dim_vo", f"must be positive, not {data['head_dim_vo']}")
    try:
        return Shape(**data)
    except ValueError as error:
        raise TableError(place, str(error)) from error


def dtypes_from(raw: object, place: str) -> DTypes:
    """Exact q, KV and out dtypes."""
    data = _mapping(raw, place, ("q", "kv", "out"))
    try:
        return DTypes(*(_text(data[key], f"{place}.{key}") for key in ("q", "kv", "out")))
    except ValueError as error:
        if isinstance(error, TableError):
            raise
        raise TableError(place, str(error)) from error


def _mapping(raw: object, place: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> Raw:
    if not isinstance(raw, dict):
        raise TableError(place, f"must be a mapping, not {_kind(raw)}")
    for key in required:
        if key not in raw:
            raise TableError(place, f"key {key!r} is missing")
    for key in raw:
        if key not in required and key not in optional:
            raise TableError(place, f"unknown key {show(key)}")
    return raw


def _each(raw: object, place: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
    if not isinstance(raw, list):
        raise TableError(place, f"must be a list, not {_kind(raw)}")
    return tuple(read(item, f"{place}[{index}]") for index, item in enumerate(raw))


def _maybe(raw: object, place: str, read: Callable[[object, str], T]) -> T | None:
    return None if raw is None else read(raw, place)


def _strings_by_name(raw: object, place: str) -> Mapping[str, str]:
    if not isinstance(raw, dict):
        raise TableError(place, f"must be a mapping, not {_kind(raw)}")
    return {key: _text(value, f"{place}.{key}") for key, value in raw.items()}


def _string(raw: object, place: str) -> str:
    if not isinstance(raw, str):
        raise TableError(place, f"must be a quoted string, not {show(raw)}")
    return raw


def _text(raw: object, place: str) -> str:
    if not _string(raw, place):
        raise TableError(place, "must not be empty")
    return cast(str, raw)


def _integer(raw: object, place: str) -> int:
    if type(raw) is not int:
        raise TableError(place, f"must be an integer, not {show(raw)}")
    return raw


def _number(raw: object, place: str) -> float:
    if type(raw) not in (int, float) or not isfinite(cast(float, raw)):
        raise TableError(place, f"must be a number, not {show(raw)}")
    return float(cast(float, raw))


def _scalar(raw: object, place: str) -> Scalar:
    if isinstance(raw, (list, dict)):
        raise TableError(place, f"must be one value, not {_kind(raw)}")
    return cast("Scalar", raw)


def _kind(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return show(value)
