"""What a serving process imports: answers from a proven table, or the fallback. Never an exception.

    from autotune.router import Router

    router = Router.load("tuned_configs/nvidia-h200.sglang.yaml", facts=autotune.hardware.collect())
    bound = router.bind(shape, dtypes, max_context=131072, attests={"finite_pool"})
    bound.route(batch_size=16, q_len=4, max_kv_len=8192)

Standard library and PyYAML only; docs/router.md states the rules.
"""

from __future__ import annotations

from autotune.router.bound import Bound
from autotune.router.explanation import Explanation
from autotune.router.router import Router
from autotune.router.status import Recapture, RouterStatus

__all__ = ["Bound", "Explanation", "Recapture", "Router", "RouterStatus"]
