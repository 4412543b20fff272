"""The router inside a serving engine: SGLang and vLLM plugins, and ``flashinfer.install`` for anybody else.

A deployment sets one environment variable, ``AUTOTUNE_TABLE``. What holds everywhere:

- Nothing here makes serving less safe than without it: whatever goes wrong in our code is logged once and
  the engine's own call is made.
- A call is sent elsewhere only where the table says so and the static contract of the kernel that would be
  called holds for this very call.
- A kernel that the engine cannot call is never faked: the log names the start-up flag that would give it.

Nothing of an engine is imported before that engine loads its plugin; importing this package imports the
standard library only.
"""

from __future__ import annotations
