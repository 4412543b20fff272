"""The columns that ``corners.py`` looks at: where libraries' own tests do not go."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES, DTypes
from autotune.domain.shape import KvLayout, Shape


@dataclass(frozen=True)
class Corner:
    """A column that upstream tests leave out, and why it is looked at."""

    name: str
    why: str
    column: Column


BF16, FP8, FP16 = PROFILES["bf16"], PROFILES["fp8"], DTypes("fp16", "fp16", "fp16")
CONTEXT, LONG = 4096, 131072
SWITCH = "XQA changes its kernel past q_len x group = 32"


def _at(
    heads: tuple[int, int, int],
    page: int,
    dtypes: DTypes,
    q_len: int,
    batch: int = 3,
    context: int = CONTEXT,
    *,
    window: int = -1,
    sinks: bool = False,
    layout: KvLayout = KvLayout.FUSED_NHD,
    pad_value: int = 1,
) -> Column:
    shape = Shape(*heads, page, kv_layout=layout.value, window_left=window, sinks=sinks)
    return Column(shape, dtypes, q_len, batch, context, pad_value=pad_value)


# In order of interest. Batches are odd and small: rows do not fill tiles, and a proof stays quick.
CORNERS = (
    Corner("fp8-at-32", f"{SWITCH}: the last below", _at((8, 1, 128), 64, FP8, 4)),
    Corner("fp8-past-32", f"{SWITCH}: the first above", _at((8, 1, 128), 64, FP8, 5)),
    Corner("group5", "GQA group 5 divides no tile", _at((5, 1, 128), 64, BF16, 4)),
    Corner("group7", "GQA group 7 (28/4 heads)", _at((7, 1, 128), 64, BF16, 4)),
    Corner("page16", "16 tokens a page", _at((8, 1, 128), 16, BF16, 4)),
    Corner("page128", "128 tokens a page", _at((8, 1, 128), 128, BF16, 4)),
    Corner("dim64", "head_dim 64", _at((8, 1, 64), 64, BF16, 4)),
    Corner("window127", "a window that cuts a page", _at((8, 1, 128), 64, BF16, 4, window=127)),
    Corner("sinks", "gpt-oss: sinks, head_dim 64", _at((8, 1, 64), 64, BF16, 4, sinks=True)),
    Corner("q8", "q_len 8, past FlashInfer's tests", _at((8, 1, 128), 64, BF16, 8)),
    Corner("long-q1-fp8", "one request, long KV, the most splits", _at((8, 1, 128), 64, FP8, 1, 1, LONG)),
    Corner("long-q1", "one request, long KV, the most splits", _at((8, 1, 128), 64, BF16, 1, 1, LONG)),
    Corner("q6-fp8", "q_len 6, past FlashInfer's tests", _at((8, 1, 128), 64, FP8, 6)),
    Corner("q16", "q_len 16: half of a mask word", _at((8, 1, 128), 64, BF16, 16)),
    Corner("group16-fp8-at-32", f"{SWITCH}: group 16, q_len 2", _at((32, 2, 256), 64, FP8, 2)),
    Corner("group16-fp8-past-32", f"{SWITCH}: group 16, q_len 3", _at((32, 2, 256), 64, FP8, 3)),
    Corner("batch67", "XQA splits otherwise from batch 67 on 132 SMs", _at((8, 1, 128), 64, BF16, 2, 67)),
    Corner("batch33-fp8", "an odd batch under graph replay", _at((8, 1, 128), 64, FP8, 3, 33)),
    Corner("pad0", "padded rows of no tokens", _at((8, 1, 128), 64, BF16, 4, pad_value=0)),
    Corner("pad0-fp8", "padded rows of no tokens", _at((8, 1, 128), 64, FP8, 5, pad_value=0)),
    Corner("page16-q1-fp8", "16 tokens a page, Hopper fp8 kernel", _at((8, 1, 128), 16, FP8, 1)),
    Corner("page32-fp8-past-32", "32 tokens a page, Hopper fp8 kernel", _at((8, 1, 128), 32, FP8, 5)),
    Corner("page32", "32 tokens a page", _at((8, 1, 128), 32, BF16, 4)),
    Corner("page128-fp8", "128 tokens a page, Hopper fp8 kernel", _at((8, 1, 128), 128, FP8, 5)),
    Corner("group6-fp8-below-32", f"{SWITCH}: 30, group 6", _at((6, 1, 128), 64, FP8, 5)),
    Corner("group6-fp8-past-32", f"{SWITCH}: 36, group 6", _at((6, 1, 128), 64, FP8, 6)),
    Corner("group12", "GQA group 12 (96/8 heads)", _at((12, 1, 128), 64, BF16, 4)),
    Corner("group12-q1", "GQA group 12 at q_len 1", _at((12, 1, 128), 64, BF16, 1)),
    Corner("group5-q1-fp8", "group 5, Hopper fp8 kernel", _at((5, 1, 128), 64, FP8, 1)),
    Corner("group7-fp8-past-32", f"{SWITCH}: 35, group 7", _at((7, 1, 128), 64, FP8, 5)),
    Corner("q12", "q_len 12", _at((8, 1, 128), 64, BF16, 12)),
    Corner("q16-fp8", "q_len 16, Hopper fp8 kernel", _at((8, 1, 128), 64, FP8, 16)),
    Corner("q7-dim256", "q_len 7 at head_dim 256", _at((8, 1, 256), 64, BF16, 7)),
    Corner("long-q1-dim256", "long KV at head_dim 256", _at((32, 2, 256), 64, BF16, 1, 1, LONG)),
    Corner("window15-page16", "a window of one page", _at((8, 1, 128), 16, BF16, 4, window=15)),
    Corner("window2", "a window smaller than q_len", _at((8, 1, 128), 64, BF16, 4, window=2)),
    Corner(
        "window127-fp8", "a window: the generic kernel above 32", _at((8, 1, 128), 64, FP8, 5, window=127)
    ),
    Corner(
        "window127-q1", "a window at q_len 1, long KV", _at((8, 1, 128), 64, BF16, 1, 2, 32768, window=127)
    ),
    Corner("sinks-window", "gpt-oss's other layers", _at((8, 1, 64), 64, BF16, 4, window=127, sinks=True)),
    Corner("sinks-fp8", "sinks: the generic kernel above 32", _at((8, 1, 64), 64, FP8, 5, sinks=True)),
    Corner("dim64-q1-fp8", "head_dim 64, Hopper fp8 kernel", _at((8, 1, 64), 64, FP8, 1)),
    Corner("group1", "as many KV heads as query heads", _at((8, 8, 128), 64, BF16, 4)),
    Corner("group4-hnd", "several KV heads, HND", _at((32, 8, 128), 64, BF16, 4, layout=KvLayout.FUSED_HND)),
    Corner(
        "interleaved", "vLLM's pool, HND", _at((16, 2, 128), 16, BF16, 4, layout=KvLayout.INTERLEAVED_HND)
    ),
    Corner("fp16", "fp16 throughout", _at((8, 1, 128), 64, FP16, 4)),
)
