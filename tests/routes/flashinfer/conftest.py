"""Columns, facts and recorded calls for the FlashInfer route tests; none of it needs FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.domain.cell import Column
from autotune.domain.dtypes import DTypes
from autotune.domain.fingerprint import Facts
from autotune.domain.shape import Shape
from autotune.routes.base import Capacity, Route, Session
from autotune.routes.flashinfer import planned, session
from autotune.routes.flashinfer.call import Call
from autotune.routes.flashinfer.example import example_step


@pytest.fixture(scope="session")
def make_column() -> Callable[..., Column]:
    """``make_column(kv="e4m3", q_len=4, heads=(8, 1, 128), ...)``."""

    def make(
        *,
        heads: tuple[int, int, int] = (8, 1, 128),
        q: str = "bf16",
        kv: str = "bf16",
        out: str = "bf16",
        q_len: int = 4,
        batch: int = 2,
        context: int = 512,
        page: int = 64,
        layout: str = "fused-nhd",
        **shape: Any,
    ) -> Column:
        return Column(
            Shape(*heads, page, kv_layout=layout, **shape), DTypes(q, kv, out), q_len, batch, context
        )

    return make


@pytest.fixture(scope="session")
def make_facts() -> Callable[..., Facts]:
    """``make_facts("9.0")``."""

    def make(compute_capability: str, flashinfer: str | None = "0.7.2") -> Facts:
        return Facts("cuda", {"compute_capability": compute_capability}, {"flashinfer": flashinfer})

    return make


class Recorder:
    """Stands where FlashInfer's functions and wrappers stand; keeps every call in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def resolve(self, target: str) -> Callable[..., Any]:
        """A stand-in for ``target``: a function, or a wrapper class."""

        def function(*args: Any, **kwargs: Any) -> None:
            self.calls.append(Call(target, kwargs, args))

        def construct(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(Call(f"{target}.__init__", kwargs, args))
            recorder = self

            class Wrapper:
                def reset_workspace_buffer(self, floats: torch.Tensor, integers: torch.Tensor) -> None:
                    self.integers = integers

                def plan(self, *args: Any, **kwargs: Any) -> None:
                    recorder.calls.append(Call(f"{target}.plan", kwargs, args))

                def run(self, *args: Any, **kwargs: Any) -> None:
                    recorder.calls.append(Call(f"{target}.run", kwargs, args))

            return Wrapper()

        return construct if target.endswith("Wrapper") else function

    def open(self, route: Route, column: Column, batch: int | None = None) -> Session:
        """A session of ``route`` on plain CPU memory."""
        capacity = Capacity(column, batch or column.batch_size, 64, "cpu")
        return route.open(capacity, lambda name, shape, dtype: torch.empty(shape, dtype=dtype))

    def launch(self, route: Route, column: Column, kv_lens: tuple[int, ...] = (70, 130)) -> list[Call]:
        """The calls of one launch."""
        step, out = example_step(column, kv_lens)
        opened = self.open(route, column)
        opened.prepare(step)
        opened.run(out)
        return self.calls


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Replaces the import of FlashInfer by a recorder."""
    made = Recorder()
    monkeypatch.setattr(session, "resolve", made.resolve)
    monkeypatch.setattr(planned, "resolve", made.resolve)
    return made
