"""What FlashInfer reads at its import, for a process that names or builds modules."""

from __future__ import annotations

from pathlib import Path


def library_environment(arch: str, workspace: Path) -> dict[str, str]:
    """The target, a folder of its own, and no downloads behind our back.

    Args:
        arch: compute capability of the target, such as ``"9.0"``.
    """
    return {
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(workspace),
        "FLASHINFER_NO_DOWNLOAD": "1",
    }
