"""What each kernel asks of a call beyond what every kernel asks: data beside the rules that read it.

By name, so that a serving process that calls a kernel itself imports no route. A third party's route may
carry a :class:`Kernel` of its own in an attribute ``kernel``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.routes.base import Route

# A CUDA grid ends here in y and z, where kernels put batch and heads; a launch past it fails, often unseen.
GRID_LIMIT = 65535
# TMA descriptors and 16-byte vector loads: an operand at an odd address is refused, or faults.
VECTOR_BYTES = 16
# FlashInfer's documentation asks for this much scratch; how much a call needs is not checked by its kernels.
SCRATCH_BYTES = 128 * 2**20
# XQA keeps its semaphores in the head of the workspace: zero before first use, reset by the kernel itself.
XQA_SEMAPHORE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel's own demands; the defaults are those of a kernel that asks for nothing special.

    Attributes:
        dense_query: it gets no query stride, so that q must be canonical, size-1 dimensions included.
        draft_mask: q_len above 1 needs a packed mask of the new tokens.
        split_by_width: it splits the KV by the page table's width, so that another width is another program.
        host_scales: scales must be Python floats; an integer or a tensor is refused or misread.
        masked_rows: a padded row may be shorter than q_len.
        uniform_q_len: it takes one q_len for all requests.
        replan: host work before each replay of a captured graph.
        fp8_query: with an 8- or 4-bit KV cache it is handed an e4m3 query.
        sinks, soft_cap: it honours the feature; one that does not drops it without an error.
        grid_limit: largest batch, and q_len x heads, that a launch takes; None where there is no grid.
        alignment: bytes at which q, K, V, out and their rows must lie.
        table_multiple: tokens of which a page table's row must cover a multiple.
        workspace_bytes: least scratch, 0 if it takes none.
        semaphore_bytes: how much of the workspace's head must be zero before a launch.
    """

    name: str = "the kernel"
    dense_query: bool = False
    draft_mask: bool = False
    split_by_width: bool = False
    host_scales: bool = False
    masked_rows: bool = True
    uniform_q_len: bool = False
    replan: bool = False
    fp8_query: bool = False
    sinks: bool = True
    soft_cap: bool = True
    grid_limit: int | None = GRID_LIMIT
    alignment: int = 1
    table_multiple: int = 1
    workspace_bytes: int = 0
    semaphore_bytes: int = 0


ANY = Kernel()


def _torch(name: str) -> Kernel:
    return Kernel(name, uniform_q_len=True, sinks=False, soft_cap=False, grid_limit=None)


def _trtllm_gen(name: str, *, uniform: bool) -> Kernel:
    return Kernel(
        name,
        dense_query=True,
        uniform_q_len=uniform,
        fp8_query=True,
        soft_cap=False,
        alignment=VECTOR_BYTES,
        workspace_bytes=SCRATCH_BYTES,
    )


def _planned(name: str, *, fp8_query: bool = False, decode: bool = False) -> Kernel:
    return Kernel(
        name,
        masked_rows=not decode,
        uniform_q_len=decode,
        replan=True,
        fp8_query=fp8_query,
        sinks=False,
        alignment=VECTOR_BYTES,
        workspace_bytes=SCRATCH_BYTES,
    )


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        _torch("torch-sdpa"),
        _torch("torch-splitkv"),
        Kernel(
            "xqa-decode",
            dense_query=True,
            draft_mask=True,
            split_by_width=True,
            host_scales=True,
            uniform_q_len=True,
            soft_cap=False,
            alignment=VECTOR_BYTES,
            workspace_bytes=SCRATCH_BYTES,
            semaphore_bytes=XQA_SEMAPHORE_BYTES,
        ),
        _trtllm_gen("trtllm-gen-decode", uniform=True),
        _trtllm_gen("trtllm-gen-decode-ragged", uniform=False),
        _trtllm_gen("trtllm-gen-context", uniform=False),
        Kernel(
            "fmha-v2",
            dense_query=True,
            host_scales=True,
            fp8_query=True,
            alignment=VECTOR_BYTES,
            workspace_bytes=SCRATCH_BYTES,
        ),
        _planned("fa2"),
        _planned("fa3", fp8_query=True),
        _planned("fa2-decode", decode=True),
    )
}


def kernel_of(route: Route | str | None) -> Kernel:
    """The kernel behind a route, or behind a route's name; :data:`ANY` where nothing is known of it."""
    if route is None:
        return ANY
    name = route if isinstance(route, str) else route.name
    own = getattr(getattr(route, "made", route), "kernel", None)  # a foreign route is wrapped
    return own if isinstance(own, Kernel) else KERNELS.get(name, ANY)
