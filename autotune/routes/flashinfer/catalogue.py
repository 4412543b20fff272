"""Every route of this package, in the order in which reports list them."""

from __future__ import annotations

from autotune.routes.base import Route
from autotune.routes.flashinfer.fa_decode import Fa2Decode
from autotune.routes.flashinfer.fa_prefill import Fa2, Fa3
from autotune.routes.flashinfer.fmha_v2 import FmhaV2
from autotune.routes.flashinfer.trtllm_gen import TrtllmGenContext, TrtllmGenDecode, TrtllmGenDecodeRagged
from autotune.routes.flashinfer.xqa import XqaDecode


def routes() -> tuple[Route, ...]:
    """New instances; importing them does not import FlashInfer."""
    return (
        XqaDecode(),
        TrtllmGenDecode(),
        TrtllmGenDecodeRagged(),
        TrtllmGenContext(),
        FmhaV2(),
        Fa2(),
        Fa3(),
        Fa2Decode(),
    )
