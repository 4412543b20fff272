"""``dump_table`` and ``write_table``: a table as bytes that a person reviews and a router trusts.

Written by PyYAML's emitter, never by a template. Always its Python emitter: the C one breaks lines
differently, and equal tables must be equal bytes on every machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import HARDWARE_KEYS, SOFTWARE_KEYS
from autotune.domain.shape import Shape
from autotune.table.errors import TableError, TableWriteError
from autotune.table.letters import RESERVED
from autotune.table.model import Eager, Entry, Grid, Policy, Ratio, RoutingTable, Speedup
from autotune.table.source import MAX_BYTES, sign
from autotune.table.validate import validate


class _Word(str):
    """A key of the format itself; written plain where YAML allows it."""


class _Line(dict[Any, Any]):
    """A mapping on one line."""


class _Items(list[Any]):
    """A list on one line."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A lone surrogate (an argument's byte that is not UTF-8) has no YAML spelling that a loader would take.
    plain = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return dumper.represent_scalar("tag:yaml.org,2002:str", plain, '"')


_Dumper.add_representer(str, _text)
_Dumper.add_representer(_Word, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text))
_Dumper.add_representer(
    _Line, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), True)
)
_Dumper.add_representer(
    _Items, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True)
)


def dump_table(table: RoutingTable) -> bytes:
    """The table's bytes, its digest line last. Equal tables give equal bytes.

    Raises:
        TableError: the table is inconsistent, or so large that no loader would take it.
    """
    validate(table)
    text = yaml.dump(
        _words(
            schema=table.schema,
            generated=_words(
                by=table.generated.by,
                at=table.generated.at,
                study=table.generated.study,
                informative=_Line(sorted(table.facts.informative.items())),
            ),
            hardware=_line(
                device=table.facts.device,
                **{key: table.facts.hardware[key] for key in HARDWARE_KEYS[table.facts.device]},
            ),
            software=_line(**{key: table.facts.software[key] for key in SOFTWARE_KEYS[table.facts.device]}),
            policy=_line(
                engine=table.policy.engine,
                stock=table.policy.stock,
                objective=table.policy.objective,
                margin=float(table.policy.margin),
                tau=None if table.policy.tau is None else float(table.policy.tau),
                any_false_claim=float(table.policy.any_false_claim),
                pad_value=table.policy.pad_value,
                **_chosen(table.policy),
            ),
            legend=_legend(table.legend),
            families=_Line(sorted(table.families.items())),
            entries=[_entry(entry) for entry in table.entries],
            unsafe=[
                _words(route=item.route, cell=item.cell, kind=item.kind, detail=item.detail, repro=item.repro)
                for item in table.unsafe
            ],
            quarantine=[
                _words(
                    route=item.route,
                    reason=item.reason,
                    at=item.at,
                    shape=_shape(item.shape) if item.shape else None,
                    dtypes=_dtypes(item.dtypes) if item.dtypes else None,
                    q_len=item.q_len,
                    batch_size=item.batch_size,
                )
                for item in table.quarantine
            ],
        ),
        Dumper=_Dumper,
        sort_keys=False,
        width=2**31,  # one row, one line, however many batch sizes
        allow_unicode=False,
    )
    data = sign(text.encode("ascii"))
    if len(data) > MAX_BYTES:
        raise TableError("table", f"{len(data)} bytes, over the limit of {MAX_BYTES}; split it")
    return data


def write_table(table: RoutingTable, path: str | os.PathLike[str]) -> str:
    """Write atomically and durably; returns the digest. A reader sees the old file or the new one.

    A symbolic link is followed, so that the file behind it is replaced.

    Raises:
        TableError: the table is inconsistent.
        TableWriteError: no such folder, no permission, a full disk, or ``path`` is not a regular file.
    """
    data = dump_table(table)
    write_bytes(data, path)
    return data[-74:-2].decode().removeprefix('"')


def write_bytes(data: bytes, path: str | os.PathLike[str]) -> None:
    """Replace a table's file, or its signature's, as :func:`write_table` does.

    Raises:
        TableWriteError: as there.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            raise TableWriteError(f"{path}: cannot write the table: not a regular file; give another path")
        _replace(target, data)
    except TableWriteError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TableWriteError(
            f"{path}: cannot write the table: {reason}; check the folder, its permissions and free space"
        ) from error


def _replace(target: Path, data: bytes) -> None:
    # In the same folder: a rename is atomic only inside one file system. os.open applies the umask, which is
    # right for a new file only: servers that could read the old one must be able to read this one.
    before = target.stat() if target.exists() else None
    temporary = target.parent / f".{target.name}.{secrets.token_hex(6)}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            if before is not None:
                _keep_owner_and_mode(descriptor, before)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _keep_owner_and_mode(descriptor: int, before: os.stat_result) -> None:
    # As far as this user may. The owner first: changing it clears bits of the mode.
    for owner in ((before.st_uid, -1), (-1, before.st_gid)):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, *owner)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _words(**items: Any) -> dict[Any, Any]:
    return {_Word(key): value for key, value in items.items()}


def _line(**items: Any) -> _Line:
    return _Line(_words(**items))


def _chosen(policy: Policy) -> dict[str, Any]:
    """What the export chose; a table of the models' own layers and nothing hidden has neither key."""
    hidden = None if policy.hidden_prepare is None else float(policy.hidden_prepare)
    values = {"layers": policy.layers, "hidden_prepare": hidden}
    return {name: value for name, value in values.items() if value is not None}


def _legend(legend: Mapping[str, str]) -> dict[str, str]:
    routes = sorted((letter, name) for letter, name in legend.items() if letter not in RESERVED)
    return {**dict(routes), **RESERVED}


def _shape(shape: Shape) -> _Line:
    plain = {key: value.value if isinstance(value, Enum) else value for key, value in shape.to_dict().items()}
    return _line(**plain)


def _dtypes(dtypes: DTypes) -> _Line:
    return _line(**dtypes.to_dict())


def _entry(entry: Entry) -> dict[Any, Any]:
    stated = entry.fallback_requires
    written = _words(
        shape=_shape(entry.shape),
        dtypes=_dtypes(entry.dtypes),
        models=_Items(entry.models),
        fallback=entry.fallback,
        **({} if stated is None else {"fallback_requires": _Items(stated)}),
        max_context=entry.max_context,
        q_len=entry.q_len,
        batch_size=_Items(entry.batch_size),
        routes=_grid(entry.routes),
    )
    if entry.eager:
        written[_Word("eager")] = _eager(entry.eager)
    written |= _words(
        speedup=_speedup(entry.speedup, entry.routes),
        proof={
            proof.route: _line(
                checks=proof.checks,
                launches=proof.launches,
                worst_error=float(proof.worst_error),
                fallback_error=float(proof.fallback_error),
                requires=_Items(proof.requires),
                limits=_Items(proof.limits),
            )
            for proof in entry.proof
        },
    )
    return written


def _eager(eager: Eager) -> dict[Any, Any]:
    return _words(
        batch_size=_Items(_Items(interval) for interval in eager.intervals),
        routes=_grid(eager.routes),
        speedup=_speedup(eager.speedup, eager.routes),
    )


def _grid(grid: Grid) -> dict[str, str]:
    return {**{str(row.kv_high): row.letters for row in grid.rows}, "any": grid.any}


def _speedup(speedup: Speedup, grid: Grid) -> dict[Any, Any]:
    return _words(low=_ratios(speedup.low, grid), vs_stock=_ratios(speedup.vs_stock, grid))


def _ratios(ratios: tuple[tuple[Ratio, ...], ...], grid: Grid) -> dict[str, _Items]:
    return {
        str(row.kv_high): _Items(None if value is None else float(value) for value in values)
        for row, values in zip(grid.rows, ratios, strict=True)
    }
