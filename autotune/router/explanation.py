"""An answer with its reason and its proof. The hot path hands out prebuilt ones."""

from __future__ import annotations

from typing import NamedTuple

from autotune.table.model import Proof


class Why:
    """Why an answer is what it is, as plain strings. All but ``proven_faster`` answer the fallback.

    Up to ``quarantined`` the table says so; from ``requires`` on, the call is outside what it proves.
    """

    PROVEN_FASTER = "proven_faster"
    NOT_FASTER = "not_faster"
    CANDIDATE_UNSAFE = "candidate_unsafe"
    UNPROVEN = "unproven"
    TOO_LARGE = "too_large"
    NO_SAFE_ROUTE = "no_safe_route"
    QUARANTINED = "quarantined"
    REQUIRES = "requires_not_attested"
    INACTIVE = "router_inactive"
    BAD_INPUT = "bad_input"
    SHAPE = "shape_not_in_table"
    PAD_VALUE = "pad_value_not_proven"
    MAX_CONTEXT = "max_context_not_proven"
    Q_LEN = "q_len_not_in_table"
    BATCH_SIZE = "batch_size_not_proven"
    KV_LEN = "kv_len_not_proven"


class Explanation(NamedTuple):
    """One answer.

    Attributes:
        answer: the kernel's name, or the caller's own word for its fallback.
        proven: the answer is a route that is proven safe and faster here.
        use_decode: ``proven`` and the route is of the decode family.
        why: one of ``Why``: the decision's reason, or what puts the call outside the table.
        detail: one line for a person.
        speedup_low: proven lower bound of time(fallback) / time(answer); None unless ``proven`` and a row
            was named by ``max_kv_len``.
        vs_stock: median of time(stock) / time(answer), where measured.
        proof: what stands behind a route the table names here, also where it was not attested.
        assumes: where the answer is the table's fallback for this call, what that one's proof assumed,
            attested or not; None where the table does not state it, and outside the table.
    """

    answer: str
    proven: bool
    use_decode: bool
    why: str
    detail: str
    speedup_low: float | None = None
    vs_stock: float | None = None
    proof: Proof | None = None
    assumes: tuple[str, ...] | None = None
