"""Do all ranks of a group answer from the same table? If not, all of them answer with the fallback.

The digests go through the group's key-value store, not through a collective: no device is touched, nothing is
enqueued, a rank that does not come is waited for only so long and can be named, and there is one verdict. Who
finds out first, that all agree or that somebody differs or is late, writes it; a compare-and-set keeps the
first, and every rank that can reach the store, a late one too, acts on that one.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.router.binding import line_of
from autotune.router.log import logger

if TYPE_CHECKING:
    from autotune.router.router import Router

_SAME = "same"
# How often each group was asked about: every call has its own keys, and ranks must make the same calls.
_calls: dict[str, int] = {}


class Agreement(NamedTuple):
    """The verdict of a group.

    Attributes:
        same: every rank holds the same table in use (or none does).
        detail: one line: who holds what, or who did not answer.
    """

    same: bool
    detail: str


def assert_same_table(router: Router, group: Any = None, timeout_s: float = 60.0) -> Agreement:
    """Compare the tables in use of all ranks; on any difference put this one on the fallback. Never raises.

    Every rank of ``group`` must call it, equally often, with the same ``timeout_s``: after loading, and again
    after each reload (``Router.poll`` on every rank at the same step, instead of ``Router.watch``). Until a
    later call finds agreement, ``router.status`` is inactive and names the ranks. A process without
    ``torch.distributed`` is one rank, and agrees with itself.

    Args:
        group: a ``torch.distributed`` process group of any backend; None: all ranks.
        timeout_s: how long to wait for the others, in seconds.
    """
    try:
        found = _agree(router.agreed_on, group, timeout_s)
    except Exception as error:  # the store is gone, or foreign code failed: nobody knows what the others do
        found = Agreement(False, f"the ranks could not be compared: {line_of(error)}")
    if found.same:
        router.resume()
    else:
        router.suspend(f"the ranks do not share one table: {found.detail}")
    return found


def _agree(mine: str, group: Any, timeout_s: float) -> Agreement:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return Agreement(True, "one rank")
    ranks = list(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    if len(ranks) == 1:
        return Agreement(True, "one rank")
    name = ",".join(map(str, ranks))
    call = _calls[name] = _calls.get(name, 0) + 1
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = PrefixStore(f"autotune/same-table/{name}/{call}", _get_default_store())
    store.set(str(dist.get_rank()), mine)
    found = _collect(store, ranks, monotonic() + timeout_s)
    verdict = _verdict(found, ranks)
    # An empty expectation means "only if nobody has set it"; what is returned is what stands there.
    standing = store.compare_set("verdict", "", verdict).decode()
    return Agreement(standing == _SAME, f"all hold {mine}" if standing == _SAME else standing)


def _collect(store: Any, ranks: list[int], deadline: float) -> dict[int, str]:
    from datetime import timedelta

    found: dict[int, str] = {}
    for rank in ranks:
        # At least a moment: what is there already must be seen even where the time is spent.
        left = timedelta(seconds=max(0.05, deadline - monotonic()))
        try:
            store.wait([str(rank)], left)
            found[rank] = store.get(str(rank)).decode()
        except RuntimeError:  # torch's DistStoreError: not in time
            logger().info("rank %d did not name its table in time", rank)
    return found


def _verdict(found: dict[int, str], ranks: list[int]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, table in found.items():
        holders.setdefault(table, []).append(rank)
    silent = [rank for rank in ranks if rank not in found]
    if len(holders) == 1 and not silent:
        return _SAME
    parts = [f"{_named(listed)} {table[:23]}" for table, listed in holders.items()]
    if silent:
        parts.append(f"{_named(silent)} did not answer in time")
    return "; ".join(parts)


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
