"""Arenas by name."""

from __future__ import annotations

import pytest
import torch

from autotune.arena.base import Placement
from autotune.arena.factory import KINDS, default_kind, open_arena


def test_every_kind_opens_on_the_cpu_as_asked() -> None:
    for kind in KINDS:
        with open_arena(kind, "cpu", Placement.HEAD, 64) as arena:
            assert (arena.kind, arena.placement, arena.slack) == (kind, Placement.HEAD, 64)
            assert arena.guarded == (kind != "plain")
            assert arena.tensor("x", (2, 3), torch.float32).fill_(1.0).sum() == 6.0
            assert arena.overwritten() == []


def test_the_default_is_guarded() -> None:
    with open_arena(default_kind("cpu"), "cpu") as arena:
        assert arena.guarded


def test_unguarded_memory_is_never_a_default() -> None:
    with pytest.raises(ValueError, match="no guarded arena for device 'tpu:0'"):
        default_kind("tpu:0")


def test_an_unknown_kind_names_the_choices() -> None:
    with pytest.raises(ValueError, match=r"unknown arena 'mmap'; one of host_mmap, plain"):
        open_arena("mmap", "cpu")


def test_a_host_arena_serves_no_gpu() -> None:
    with pytest.raises(ValueError, match="arena host_mmap serves cpu, not device 'cuda:1'"):
        open_arena("host_mmap", "cuda:1")
