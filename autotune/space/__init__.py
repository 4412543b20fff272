"""Search-space files -> cells. ``open_space``, ``load_engine``, ``expand`` are the way in."""

from __future__ import annotations

from autotune.space.engine import Engine, load_engine
from autotune.space.errors import SpaceError, UnknownProfile
from autotune.space.grid import Entry, Grid, SpaceCell, expand
from autotune.space.library import engine_names, model_names, profiles
from autotune.space.model import LayerKind, Model, attention_tp, load_model, per_rank_shape
from autotune.space.space import ModelUse, Space, load_file, load_profile, open_space

__all__ = [
    "Engine",
    "Entry",
    "Grid",
    "LayerKind",
    "Model",
    "ModelUse",
    "Space",
    "SpaceCell",
    "SpaceError",
    "UnknownProfile",
    "attention_tp",
    "engine_names",
    "expand",
    "load_engine",
    "load_file",
    "load_model",
    "load_profile",
    "model_names",
    "open_space",
    "per_rank_shape",
    "profiles",
]
