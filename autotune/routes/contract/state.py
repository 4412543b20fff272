"""Rules of what outlives a call: workspaces, semaphores, captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.routes.contract.call import Call, Rule
from autotune.routes.contract.context import addresses

if TYPE_CHECKING:
    import torch


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _workspace(call: Call) -> str | None:
    buffers, need = call.context.buffers, call.kernel.workspace_bytes
    if buffers is None or not need:
        return None
    space = buffers.workspace
    if space is None:
        return f"no workspace is given; {call.kernel.name} needs {need} bytes"
    found = space.numel() * space.element_size()
    if found < need:
        return f"the workspace has {found} bytes; {call.kernel.name} needs {need} and does not check"
    if not space.is_contiguous():
        return f"the workspace has strides {space.stride()}; it must be contiguous"
    return None


def _private_workspace(call: Call) -> str | None:
    buffers = call.context.buffers
    if buffers is None:
        return None
    ours = [
        (name, part) for name in ("workspace", "counters") if (part := getattr(buffers, name)) is not None
    ]
    for name, part in ours:
        start, end = _span(part)
        for other, tensor in buffers.others:
            first, last = _span(tensor)
            if start < last and first < end:
                shared = min(end, last) - max(start, first)
                return (
                    f"the {name} at {start:#x} shares {shared} bytes with {other}; "
                    "what one leaves there the other takes for its own"
                )
    return None


def _semaphores(call: Call) -> str | None:
    buffers = call.context.buffers
    if buffers is None or not call.full:
        return None
    import torch

    parts = []
    if buffers.workspace is not None and call.kernel.semaphore_bytes:
        parts.append(
            ("workspace", buffers.workspace.flatten().view(torch.uint8)[: call.kernel.semaphore_bytes])
        )
    if buffers.counters is not None:
        parts.append(("counters", buffers.counters.flatten().view(torch.uint8)))
    for name, part in parts:
        if int(torch.count_nonzero(part)):
            at = int(part.nonzero()[0])
            return (
                f"byte {at} of the {name} is {int(part[at])}; {call.kernel.name} counts from zero in "
                f"its first {part.numel()} bytes"
            )
    return None


def _graph(call: Call) -> str | None:
    graph, step = call.context.graph, call.step
    if graph is None:
        return None
    if step.batch_size != graph.batch_size:
        return f"{step.batch_size} requests; the graph was captured for {graph.batch_size}"
    now = dict(addresses(step, call.out))
    for name, address in graph.addresses:
        if name in now and now[name] != address:
            return f"{name} is at {now[name]:#x}; the graph reads it at {address:#x}, where it was captured"
    if call.kernel.replan and graph.replanned is None:
        return f"nothing was planned for this replay; {call.kernel.name} plans on the host before each"
    if graph.plan is not None and graph.replanned is not None and graph.replanned != graph.plan:
        return f"the plan is {graph.replanned!r}; the graph was captured with {graph.plan!r}"
    return None


WORKSPACE = Rule(
    "workspace",
    _workspace,
    "scratch is written past its end, or the plan fails",
    ("vllm #40023", "vllm #25520"),
)
PRIVATE_WORKSPACE = Rule(
    "private_workspace",
    _private_workspace,
    "one kernel's scratch is another's semaphores",
    ("vllm #25520", "flashinfer #2408"),
)
SEMAPHORES = Rule(
    "semaphores",
    _semaphores,
    "a counter that is not zero names the wrong last CTA: splits are lost",
    ("vllm #25520", "flashinfer #2408"),
    full=True,
)
GRAPH = Rule(
    "graph",
    _graph,
    "a replay reads what was captured, not what was rebound",
    ("sglang #26655", "TensorRT-LLM #18002", "vllm #25490"),
)
