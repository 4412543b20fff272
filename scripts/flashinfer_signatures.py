"""Snapshot the signatures that the FlashInfer routes call, from the FlashInfer that this interpreter imports.

    python scripts/flashinfer_signatures.py tests/data/flashinfer-signatures.json

adds or replaces the installed version's entry, so CI without FlashInfer still binds every call to both
versions' real signatures.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path

TARGETS = (
    "flashinfer.decode:trtllm_batch_decode_with_kv_cache",
    "flashinfer.prefill:trtllm_batch_context_with_kv_cache",
    "flashinfer.prefill:trtllm_fmha_v2_prefill",
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.__init__",
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.plan",
    "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.run",
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.__init__",
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.plan",
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.run",
)
# A plan that takes **kwargs says nothing; the method that it hands them to does.
INNER = {
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.plan": (
        "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper._plan_impl"
    ),
}


def signature(target: str) -> list[list[str | bool]]:
    """[[name, kind, has a default], ...] of a function or method."""
    module, _, path = target.partition(":")
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)
    return [
        [parameter.name, parameter.kind.name, parameter.default is not inspect.Parameter.empty]
        for parameter in inspect.signature(found).parameters.values()
    ]


def main(path: Path) -> None:
    """Write the installed version's entry into ``path``."""
    version = str(importlib.import_module("flashinfer").__version__)
    snapshots = json.loads(path.read_text()) if path.is_file() else {}
    entry = {}
    for target in TARGETS:
        parameters = signature(target)
        if any(kind == "VAR_KEYWORD" for _, kind, _ in parameters):
            parameters = signature(INNER[target])
        entry[target] = parameters
    snapshots[version] = entry
    lines = []
    for release in sorted(snapshots):
        body = ",\n".join(
            f"  {json.dumps(target)}: {json.dumps(snapshots[release][target])}"
            for target in sorted(snapshots[release])
        )
        lines.append(f" {json.dumps(release)}: {{\n{body}\n }}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
