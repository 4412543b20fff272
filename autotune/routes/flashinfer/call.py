"""A call of the library as data: which function, which arguments."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a FlashInfer function or wrapper method.

    Attributes:
        target: ``"flashinfer.decode:trtllm_batch_decode_with_kv_cache"``, or with a class:
            ``"flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.plan"``.
        args: positional arguments, ``self`` left out.
    """

    target: str
    kwargs: Mapping[str, Any]
    args: tuple[Any, ...] = field(default=())

    @property
    def method(self) -> bool:
        """Whether the target takes ``self``."""
        return "." in self.target.partition(":")[2]


def resolve(target: str) -> Callable[..., Any]:
    """Import what ``target`` names. Raises ``ImportError`` or ``AttributeError``."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def bind(call: Call, signature: inspect.Signature) -> inspect.BoundArguments:
    """Bind ``call`` to a signature. Raises ``TypeError`` where the library would."""
    receiver = (None,) if call.method else ()
    return signature.bind(*receiver, *call.args, **call.kwargs)
