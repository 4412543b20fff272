"""What an engine's tensors are in the table's words: dtypes and the layout of the KV pool.

Reads shapes, strides, dtypes and addresses of tensors; never their contents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.domain.shape import KvLayout

if TYPE_CHECKING:
    import torch

_NAMES = {
    "torch.float64": "fp64",
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float8_e4m3fn": "e4m3",
}


def dtype_name(dtype: object) -> str | None:
    """``bf16`` for ``torch.bfloat16``; None for a type that no table has (packed nvfp4 among them)."""
    return _NAMES.get(str(dtype))


def layout_of(k: torch.Tensor, v: torch.Tensor) -> str | None:
    """The pool behind two logical NHD views [pages, page_size, heads, head_dim]; None where no table has it.

    ``fused``: V starts a whole number of pages after K in the same storage; ``interleaved``: K and V of a
    page lie together; ``packed``: K and V of a token's head do; ``separate``: K's pages are dense, and so are
    V's. With one head or one token a page both orders are the same bytes and it is called ``nhd``, unless the
    strides are those of an HND pool.
    """
    size, row = k.element_size(), k.shape[3]
    page = k.stride(0) * size
    own = k[0].numel() * size
    v_page, v_own = v.stride(0) * v.element_size(), v[0].numel() * v.element_size()
    apart = v.data_ptr() - k.data_ptr()
    same = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    hnd = k.shape[1] > 1 and k.shape[2] > 1 and k.stride(1) < k.stride(2)
    order = "hnd" if hnd else "nhd"
    if _rows(k, hnd, row) and _rows(v, hnd, v.shape[3]):
        if same and page == v_page == 2 * own and apart == own:
            return KvLayout(f"interleaved-{order}").value
        if same and page == own and v_page == v_own and apart > 0 and apart % page == 0:
            return KvLayout(f"fused-{order}").value
        if page == own and v_page == v_own:
            return KvLayout(f"separate-{order}").value
    packed = page == v_page == 2 * own and apart == row * size
    if same and packed and _rows(k, hnd, 2 * row) and _rows(v, hnd, 2 * row):
        return KvLayout(f"packed-{order}").value
    return None


def _rows(cache: torch.Tensor, hnd: bool, apart: int) -> bool:
    """Whether a page's rows follow each other, ``apart`` elements from start to start."""
    _, tokens, heads, _ = cache.shape
    wanted = (apart, tokens * apart) if hnd else (heads * apart, apart)
    found = cache.stride()
    # a stride that no element uses may have any value
    return found[3] == 1 and all(
        size == 1 or stride == want
        for size, stride, want in zip((tokens, heads), found[1:3], wanted, strict=True)
    )
