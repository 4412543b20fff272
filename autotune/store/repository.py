"""Every question and answer between the program and its database."""

from __future__ import annotations

from autotune.store.measurements import Measurements
from autotune.store.proofs import Proofs
from autotune.store.queue import Queue
from autotune.store.rechecks import Rechecks
from autotune.store.studies import Studies
from autotune.store.upkeep import Upkeep


class Repository(Studies, Queue, Proofs, Measurements, Rechecks, Upkeep):
    """Typed access to one database. Each call is one transaction, committed before it returns.

    Every method raises ``StoreError`` (one line) when the database fails; what the failing call was to store
    is then not stored, and everything before it is.
    """
