"""Options that several commands share, written once: a command takes them as one object."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def gathered(command: Callable[..., int]) -> Callable[..., int]:
    """Show the parser the fields of each dataclass that ``command`` takes, in the place of that parameter.

    The fields carry the options (``Annotated`` types) and their defaults; ``command`` gets the object.

    Raises:
        ValueError: two parameters would have one name.
    """
    takes = inspect.signature(command, eval_str=True)
    kinds: dict[str, type[Any]] = {}
    shown: list[inspect.Parameter] = []
    for name, parameter in takes.parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            kinds[name] = kind
            shown += _options(kind)
        else:
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def parsed(**given: Any) -> int:
        made = {
            name: kind(**{each.name: given.pop(each.name) for each in fields(kind)})
            for name, kind in kinds.items()
        }
        return command(**made, **given)

    # not functools.wraps: the parser would look at what is wrapped
    parsed.__name__, parsed.__doc__, parsed.__module__ = command.__name__, command.__doc__, command.__module__
    parsed.__annotations__ = {each.name: each.annotation for each in shown}
    parsed.__signature__ = takes.replace(parameters=shown)  # type: ignore[attr-defined]
    return parsed


def _options(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(each.name, keyword, default=each.default, annotation=hints[each.name])
        for each in fields(kind)
    ]
