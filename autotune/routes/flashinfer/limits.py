"""What a kernel takes, as one-line reasons why it does not take a column.

The facts are FlashInfer's own checks and its test matrix; a combination that the library accepts but does
not test is left to the proof.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.domain.dtypes import Dtype
from autotune.domain.shape import KvLayout
from autotune.routes.arithmetic import Arithmetic

if TYPE_CHECKING:
    from collections.abc import Collection

    from autotune.domain.cell import Column
    from autotune.domain.fingerprint import Facts

SIXTEEN_BIT = (Dtype.BF16.value, Dtype.FP16.value)
E4M3 = Dtype.E4M3.value
NVFP4 = Dtype.NVFP4.value
# Kernels with an e4m3 query multiply in fp8 twice: the softmax's result is rounded to e4m3 as well.
FP8_ARITHMETIC = Arithmetic(query=E4M3, weights=E4M3)


def capability(facts: Facts) -> tuple[int, int] | None:
    """(major, minor) of the device; None without a CUDA device."""
    text = facts.hardware.get("compute_capability")
    if facts.device != "cuda" or not isinstance(text, str):
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def device(facts: Facts, majors: Collection[int], kernel: str) -> str | None:
    """Refusal of a device whose compute capability has none of ``majors``, or without the library."""
    found = capability(facts)
    if found is None:
        return f"{kernel} needs a CUDA device"
    if found[0] not in majors:
        wanted = ", ".join(f"{major}.x" for major in sorted(majors))
        return f"{kernel} runs on compute capability {wanted}, not {found[0]}.{found[1]}"
    if not facts.software.get("flashinfer"):
        return "FlashInfer is not installed"
    return None


def kv_dtype(column: Column, allowed: Collection[str], kernel: str) -> str | None:
    """Refusal of a KV dtype, or of its place in a layout."""
    if column.dtypes.kv not in allowed:
        return f"{kernel} takes KV in {', '.join(allowed)}, not {column.dtypes.kv}"
    if column.dtypes.kv == NVFP4 and KvLayout(column.shape.kv_layout).packed:
        return (
            f"no engine packs K and V of a token where the KV is {NVFP4}: vLLM makes them heads of their own"
        )
    return None


def same_16_bit(column: Column, kernel: str) -> str | None:
    """Refusal of a 16-bit KV cache whose dtype is not the query's."""
    dtypes = column.dtypes
    if dtypes.kv in SIXTEEN_BIT and dtypes.q != dtypes.kv:
        return f"{kernel} takes {dtypes.kv} KV with a {dtypes.kv} query only, not {dtypes.q}"
    return None


def equal_head_dims(column: Column, kernel: str) -> str | None:
    """Refusal of V heads of another size than K heads."""
    shape = column.shape
    if shape.head_dim != shape.head_dim_vo:
        return f"{kernel} needs equal QK and VO head dims, not {shape.head_dim} and {shape.head_dim_vo}"
    return None


def head_dims(column: Column, allowed: Collection[int], kernel: str) -> str | None:
    """Refusal of a head size that has no kernel."""
    if column.shape.head_dim not in allowed:
        sizes = ", ".join(str(size) for size in sorted(allowed))
        return f"{kernel} has kernels for head_dim {sizes}, not {column.shape.head_dim}"
    return None


def pages(column: Column, allowed: Collection[int], kernel: str) -> str | None:
    """Refusal of a page size."""
    if column.shape.page_size not in allowed:
        sizes = ", ".join(str(size) for size in sorted(allowed))
        return f"{kernel} takes pages of {sizes} tokens, not {column.shape.page_size}"
    return None


def no_soft_cap(column: Column, kernel: str) -> str | None:
    """Refusal of a logits soft cap."""
    return f"{kernel} has no logits soft cap" if column.shape.soft_cap else None


def first(*reasons: str | None) -> str | None:
    """The first refusal, if any."""
    return next((reason for reason in reasons if reason), None)
