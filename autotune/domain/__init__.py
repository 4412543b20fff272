"""Pure data: shapes, cells, verdicts, decisions, fingerprints. Standard library only.

Every other part of the package speaks in these words; a serving process imports them too, so
nothing here may import torch, YAML or anything of ours outside ``autotune.domain``.
"""
