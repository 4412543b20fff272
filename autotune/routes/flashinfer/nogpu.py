"""FlashInfer's own Python layer on a machine without a GPU.

The library checks its arguments, picks a kernel and names the module it wants in Python; only then does
compiled code run. Here that code is replaced: ``load(spec)`` is called where the library would build and
load a module, and what it returns is called with exactly the arguments that the compiled launcher would
get. ``autotune.prebuild`` learns module names this way, tests see what a launcher would receive.

Not for threads, and not beside real use of the library in the same process: it replaces functions of the
loaded modules and clears the library's module caches on entry and exit.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

# By type: asking tens of thousands of objects for an attribute costs more than all else here.
_CACHED = type(lru_cache(lambda: None))


class Silent:
    """A compiled module that does nothing: every function of it accepts anything; ``plan`` returns []."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: []


def _library_modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if module is not None and (name == "flashinfer" or name.startswith("flashinfer."))
    ]


def _clear_caches() -> None:
    for module in _library_modules():
        for value in list(vars(module).values()):
            if isinstance(value, _CACHED):
                value.cache_clear()


@contextmanager
def no_gpu(compute_capability: tuple[int, int], sm_count: int, load: Callable[[Any], Any]) -> Iterator[None]:
    """Let FlashInfer run on CPU tensors as if on the given device.

    Args:
        load: gets the library's ``JitSpec`` (its ``name`` is the module's) and returns the stand-in.

    Raises:
        ImportError: FlashInfer is not installed.
    """
    importlib.import_module("flashinfer.decode")
    spec_class = importlib.import_module("flashinfer.jit.core").JitSpec

    major, minor = compute_capability
    properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=sm_count, name="emulated")
    replaced: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda device: properties,
        "get_compute_capability": lambda device: (major, minor),
        "get_device_sm_count": lambda device: sm_count,
        "device_support_pdl": lambda device: major >= 9,
        "setup_cubin_loader": lambda path: None,
        # naming this module needs the cubin index, which is a download
        "gen_trtllm_gen_fmha_module": lambda *args, **kwargs: SimpleNamespace(
            name="fmha_gen",
            build_and_load=lambda: load(SimpleNamespace(name="fmha_gen")),
            get_library_path=lambda: None,  # 0.6
            get_library_paths=tuple,  # 0.7
        ),
    }
    empty = torch.empty

    def pageable(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return empty(*args, **kwargs)

    with ExitStack() as stack:
        _clear_caches()
        stack.callback(_clear_caches)
        for module in _library_modules():
            for name, value in replaced.items():
                if name in vars(module):
                    stack.enter_context(patch.object(module, name, value))
        stack.enter_context(patch.object(spec_class, "build_and_load", lambda spec: load(spec)))
        stack.enter_context(patch.object(torch, "empty", pageable))
        yield
