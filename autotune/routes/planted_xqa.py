"""The real XQA kernel with the metadata mistake of the crash that started this: a page table too narrow.

``planted-xqa-clean`` is the route ``xqa-decode`` itself; ``planted-xqa-narrow-table`` hands it a table that
was built from lengths without the new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.domain.cell import Column
from autotune.domain.dtypes import PROFILES
from autotune.domain.shape import Shape
from autotune.routes.base import Capture, Family, Need
from autotune.routes.planted_live import Mistaken, NarrowTable

if TYPE_CHECKING:
    from autotune.domain.fingerprint import Facts
    from autotune.routes.base import Allocate, Capacity, Session

NAMES = ("planted-xqa-clean", "planted-xqa-narrow-table")
# Llama-3.1-70B at attn_tp 8: a module that every space of an SM90 device builds. Four rows of int32 fill 16
# bytes, so that the table's end is flush with unmapped memory: XQA takes the page id -1 of padding for zeros.
COLUMN = Column(Shape(8, 1, 128, 64), PROFILES["bf16"], q_len=4, batch_size=4, max_context=512)


@dataclass(frozen=True)
class PlantedXqa:
    """A route by name.

    Raises:
        ValueError: no such name.
    """

    name: str

    family = Family.DECODE
    capture = Capture.FREE
    needs: frozenset[Need] = frozenset({Need.UNIFORM_Q_LEN})
    deterministic = False
    version = 1

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"no planted route is called {self.name!r}; there are {', '.join(NAMES)}")

    def supports(self, column: Column, facts: Facts) -> str | None:
        """What XQA supports."""
        from autotune.routes.flashinfer.xqa import XqaDecode

        return XqaDecode().supports(column, facts)

    def open(self, capacity: Capacity, allocate: Allocate) -> Session:
        """XQA's session, its table narrowed unless this is the clean one."""
        from autotune.routes.flashinfer.xqa import XqaDecode

        session = XqaDecode().open(capacity, allocate)
        if self.name == "planted-xqa-clean":
            return session
        return Mistaken(session, NarrowTable(), capacity, allocate)
