"""Dequantisation scales in the terms of each kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.routes.base import Step


@dataclass(frozen=True, slots=True)
class BmmScales:
    """``bmm1`` multiplies q.k (softmax scale included), ``bmm2`` multiplies p.v.

    Python floats, not integers and not tensors: XQA tests ``isinstance(scale, float)`` and fmha-v2 takes
    host floats only.
    """

    bmm1: float
    bmm2: float


def bmm_scales(step: Step, *, q_scale: float = 1.0, o_scale: float = 1.0) -> BmmScales:
    """bmm1 = q_scale x k_scale x sm_scale, bmm2 = v_scale / o_scale.

    XQA turns these back into its own: kv_scale = bmm2 x o_scale and q_scale = bmm1 / kv_scale x
    sqrt(head_dim), so bmm2 must not be zero.
    """
    return BmmScales(
        float(q_scale) * float(step.k_scale) * float(step.sm_scale), float(step.v_scale) / float(o_scale)
    )
