"""Models: head counts and kinds of attention layers; and what one rank sees of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.domain.shape import KvLayout, Shape
from autotune.space.errors import SpaceError
from autotune.space.reader import read

SCHEMA = "autotune/model/1"
_KINDS = ("full", "sliding")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of one model that make the same attention call.

    ``window`` counts the tokens a query sees, itself included, as ``sliding_window`` of a config.json
    does; 0 for full attention. Linear-attention layers make no such call and are not listed.
    """

    kind: str
    layers: int
    window: int = 0

    @property
    def window_left(self) -> int:
        """Earlier tokens a query may see; -1 for all."""
        return self.window - 1 if self.window else -1

    def __str__(self) -> str:
        return f"{self.kind} {self.window}" if self.window else self.kind


@dataclass(frozen=True, slots=True)
class Model:
    """Head counts of a whole model, before any parallelism; ``soft_cap`` 0.0 means none."""

    name: str
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    attention: tuple[LayerKind, ...]
    sinks: bool = False
    soft_cap: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a digest."""
        return {
            "name": self.name,
            "heads": [self.num_attention_heads, self.num_kv_heads, self.head_dim],
            "attention": [[kind.kind, kind.layers, kind.window] for kind in self.attention],
            "sinks": self.sinks,
            "soft_cap": self.soft_cap,
        }


def load_model(path: Path) -> Model:
    """Read ``models/NAME.yaml``; raises :class:`SpaceError`."""
    top = read(path)
    top.schema(SCHEMA)
    top.only(
        (
            "schema",
            "name",
            "num_attention_heads",
            "num_kv_heads",
            "head_dim",
            "attention",
            "sinks",
            "soft_cap",
        )
    )
    name = top.text("name")
    if name != path.stem:
        top.fail("name", f'must be the file\'s name "{path.stem}", not "{name}"')
    heads, kv_heads = top.integer("num_attention_heads"), top.integer("num_kv_heads")
    if heads % kv_heads:
        top.fail("num_kv_heads", f"must divide num_attention_heads {heads}, not {kv_heads}")
    kinds: list[LayerKind] = []
    for item in top.sections("attention", "a list of {kind, layers, window}"):
        item.only(("kind", "layers", "window"))
        kind = item.text("kind", _KINDS)
        if kind == "full" and "window" in item:
            item.fail("window", "only a sliding kind has a window")
        found = LayerKind(kind, item.integer("layers"), item.integer("window") if kind == "sliding" else 0)
        if any((other.kind, other.window) == (found.kind, found.window) for other in kinds):
            item.fail("kind", f"{kind!r} is there twice; add the layers up")
        kinds.append(found)
    return Model(
        name=name,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=top.integer("head_dim"),
        attention=tuple(kinds),
        sinks=top.boolean("sinks") if "sinks" in top else False,
        soft_cap=top.number("soft_cap") if "soft_cap" in top else 0.0,
    )


def attention_tp(tp: int, dp: int = 1) -> int:
    """The degree that divides attention heads: TP, or TP / DP under data-parallel attention.

    Raises:
        SpaceError: a degree is not positive, or ``dp`` does not divide ``tp``.
    """
    if tp < 1 or dp < 1 or tp % dp:
        raise SpaceError(f"DP attention needs a DP degree that divides TP; {dp} does not divide {tp}")
    return tp // dp


def per_rank_shape(
    model: Model, layer_kind: LayerKind, attn_tp: int, page_size: int, kv_layout: str | KvLayout
) -> Shape:
    """What one of ``attn_tp`` ranks sees of the layers of one kind.

    Query heads are divided. KV heads are divided as far as they go; past their number each rank keeps
    one, and ``attn_tp / num_kv_heads`` ranks hold the same one.

    Raises:
        SpaceError: the heads do not divide.
    """
    heads, kv_heads = model.num_attention_heads, model.num_kv_heads
    if attn_tp < 1 or heads % attn_tp:
        raise SpaceError(f"{model.name}: attn_tp {attn_tp} does not divide its {heads} attention heads")
    if attn_tp <= kv_heads and kv_heads % attn_tp:
        raise SpaceError(f"{model.name}: attn_tp {attn_tp} does not divide its {kv_heads} KV heads")
    if attn_tp > kv_heads and attn_tp % kv_heads:
        raise SpaceError(f"{model.name}: attn_tp {attn_tp} is not a multiple of its {kv_heads} KV heads")
    return Shape(
        num_qo_heads=heads // attn_tp,
        num_kv_heads=max(1, kv_heads // attn_tp),
        head_dim=model.head_dim,
        page_size=page_size,
        kv_layout=KvLayout(kv_layout).value,
        window_left=layer_kind.window_left,
        sinks=model.sinks,
        soft_cap=model.soft_cap,
    )
