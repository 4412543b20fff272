"""What a caller binds to, in plain values: read once, its objects may change or be gone at a reload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from autotune.domain.dtypes import DTypes
from autotune.domain.shape import Shape
from autotune.router.integers import as_integer

ShapeLike: TypeAlias = "Shape | Mapping[str, Any]"
DTypesLike: TypeAlias = "DTypes | Mapping[str, Any]"


class Binding(NamedTuple):
    """One attention layer kind as the engine serves it; see ``Router.bind``."""

    shape: Shape
    dtypes: DTypes
    max_context: int
    attests: frozenset[str]
    pad_value: int | None

    @classmethod
    def of(
        cls,
        shape: ShapeLike,
        dtypes: DTypesLike,
        max_context: int,
        attests: Iterable[str],
        pad_value: int | None,
    ) -> Binding:
        """Raises ``ValueError``, or whatever a foreign object raises."""
        plain_shape, plain_dtypes = _shape(shape), _dtypes(dtypes)
        context = as_integer(max_context)
        if context is None or context < 1:
            raise ValueError(f"max_context must be a positive integer, not {text_of(max_context)}")
        pad = None if pad_value is None else as_integer(pad_value)
        if pad_value is not None and (pad is None or pad < 0):
            raise ValueError(f"pad_value must be None or a KV length in tokens, not {text_of(pad_value)}")
        return cls(plain_shape, plain_dtypes, context, _attested(attests), pad)


def text_of(value: object) -> str:
    """``str`` that never raises."""
    try:
        return str(value)
    except Exception:
        return type(value).__name__


def line_of(error: Exception) -> str:
    """What an error says, in one line of bounded length."""
    text = " ".join(text_of(error).split())
    return text[:400] or type(error).__name__


def _shape(given: ShapeLike) -> Shape:
    # Also a Shape is rebuilt: an enum member equals its string but hashes differently.
    fields = given.to_dict() if isinstance(given, Shape) else dict(given)
    return Shape.from_dict({key: _plain(value) for key, value in fields.items()})


def _dtypes(given: DTypesLike) -> DTypes:
    fields = given.to_dict() if isinstance(given, DTypes) else dict(given)
    return DTypes.from_dict({key: _plain(value) for key, value in fields.items()})


def _attested(given: Iterable[str]) -> frozenset[str]:
    if isinstance(given, Mapping):  # {"finite_pool": False} attests nothing, and its keys would
        raise ValueError(f"attests must be names, such as {{'finite_pool'}}, not {text_of(given)}")
    listed = [given] if isinstance(given, str) else given or ()
    return frozenset(_plain(need) for need in listed)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
