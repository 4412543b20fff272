"""What a hook relies on in an engine's source, as a few lines that can be compared.

A plugin that presents a batch to an engine's own code as something else depends on how that code is written,
not on signatures alone. So each method that it relies on has a fingerprint here, of its text without
comments, docstrings and blank space; an engine whose methods read otherwise is observed and not routed.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections.abc import Iterable
from typing import Any


def outline(source: str, class_name: str, methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Per method its parameters in order and the digest of its text.

    Raises:
        ValueError: the class, or one of the methods in it, is not in ``source``; or that is no Python.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"not Python: {error}") from error
    found = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name), None
    )
    if found is None:
        raise ValueError(f"has no class {class_name}")
    defined = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    lines = source.splitlines()
    made = {}
    for name in methods:
        node = defined.get(name)
        if node is None:
            raise ValueError(f"{class_name} has no method {name}")
        made[name] = {"parameters": parameters(node), "text": _digest(node, lines)}
    return made


def parameters(node: ast.FunctionDef) -> list[str]:
    """Names in order; ``=`` behind one that has a default, ``*`` and ``**`` as they are written."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    without = len(plain) - len(arguments.defaults)
    named = [argument.arg + ("=" if at >= without else "") for at, argument in enumerate(plain)]
    if arguments.vararg is not None or arguments.kwonlyargs:
        named.append("*" + (arguments.vararg.arg if arguments.vararg is not None else ""))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        named.append(argument.arg + ("" if default is None else "="))
    return [*named, f"**{arguments.kwarg.arg}"] if arguments.kwarg is not None else named


def _digest(node: ast.FunctionDef, lines: list[str]) -> str:
    # By text: what ast.dump and the tokenizer give differs between Python's versions.
    first = node.body[0]
    start, skip = node.lineno - 1, set[int]()
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and type(first.value.value) is str
    ):
        skip = set(range(first.lineno - 1, first.end_lineno or first.lineno))
    kept = [
        line.strip()
        for at, line in enumerate(lines[start : node.end_lineno], start)
        if at not in skip and line.strip() and not line.strip().startswith("#")
    ]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def fingerprint(methods: dict[str, dict[str, Any]]) -> str:
    """One value for all of it."""
    text = "\n".join(f"{name} {','.join(m['parameters'])} {m['text']}" for name, m in sorted(methods.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_class(cls: type, methods: Iterable[str]) -> str:
    """The fingerprint of a live class, before anything is hooked.

    Raises:
        ValueError, OSError: its source cannot be had, or lacks a method.
    """
    import inspect
    from pathlib import Path

    file = inspect.getsourcefile(cls)
    if file is None:
        raise ValueError(f"the source of {cls.__name__} is not here")
    return fingerprint(outline(textwrap.dedent(Path(file).read_text("utf-8")), cls.__name__, methods))
