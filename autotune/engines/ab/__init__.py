"""Two live servers against each other: ``autotune ab``.

What an operator wants to know after a table was deployed: is generation faster, by how much at least, and did
the accept length stay what it was. Standard library only.

- ``server``: one OpenAI-compatible endpoint, and what it may get wrong
- ``stream``: one streamed answer, checked against what was asked
- ``metrics``: accept length from a server's own metrics
- ``turn``: one case on one server, at its concurrency
- ``compare``: interleaved rounds, ratios, bounds
- ``switch``: one server whose mode is switched between turns
"""

from __future__ import annotations
