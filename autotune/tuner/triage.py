"""After the sweep: unsafe memory verdicts once under compute-sanitizer, what it finds behind their detail.

The note goes behind the detail of the failed row, where the table, ``explain`` and a later run find it. It
changes no verdict. Where the tool says nothing about a row (it is not installed, does not work here, or broke
down) nothing is stored, so that a later run looks again; "no finding" and "not finished" are stored, since
looking again would cost the same and say the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from autotune.sanitizer.examine import MARK, MEMORY, TIMEOUT_S, Ended, Examined, examine
from autotune.sanitizer.tool import NAME, find
from autotune.tuner.publish import accused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from autotune.store.records import Proof
    from autotune.tuner.deadline import Deadline
    from autotune.tuner.run import OpenedRun

    Examine = Callable[[Path, str, float], Examined]

# A look takes some 8 s. A route that faults in two hundred columns faults alike in most of them.
MOST_LOOKS = 8
# With less left of the budget a look is not begun.
LEAST_S = 15.0


def waiting(proofs: Iterable[Proof]) -> list[Proof]:
    """Failed rows to look at, in turn one of each route and kind.

    Those without a command (a death while timing) cannot be run again, and those with a note were looked at.
    """
    groups: defaultdict[tuple[str, str], list[Proof]] = defaultdict(list)
    for proof in proofs:
        kind = proof.result.kind
        if kind in MEMORY and kind is not None and proof.repro and MARK not in proof.result.detail:
            groups[proof.route, kind.value].append(proof)
    return [proof for proof in chain.from_iterable(zip_longest(*groups.values())) if proof is not None]


def triage(
    run: OpenedRun,
    deadline: Deadline,
    *,
    tool: Callable[[], Path | None] = find,
    look: Examine | None = None,
    first: Callable[[], object] = lambda: None,
    device: str = "cuda",
) -> str | None:
    """Look at up to ``MOST_LOOKS`` unsafe memory verdicts and store what is found.

    Args:
        first: called once, before the first look: looks take minutes and can be interrupted.
        device: which of several GPUs they use, such as ``cuda:1``.

    Returns:
        One line that says what came of it; None where there was nothing to look at, and on the CPU, where
        the address of a fault is in the verdict already.
    """
    if run.target.facts.device != "cuda":
        return None
    rows = waiting(accused(run))
    if not rows:
        return None
    if (path := tool()) is None:
        return f"{_verdicts(len(rows))} not looked at: {NAME} is not installed; {_stands(len(rows))}"
    ends: Counter[Ended] = Counter()
    said = ""
    first()
    for proof in rows[:MOST_LOOKS]:
        if deadline.left < LEAST_S:
            said = "the budget is spent"
            break
        limit = min(TIMEOUT_S, deadline.left)
        found = (look or partial(_look, device))(path, proof.repro, limit)
        ends[found.ended] += 1
        said = found.said or said
        if found.ended is Ended.REFUSED:
            break
        # one that the budget cut short gets its whole time from a later run
        if found.ended in (Ended.FOUND, Ended.NOTHING) or (found.ended is Ended.LATE and limit == TIMEOUT_S):
            run.repository.annotate(run.fingerprint, proof, found.note)
    return _summary(len(rows), ends, said)


def _look(device: str, path: Path, repro: str, timeout_s: float) -> Examined:
    return examine(path, repro, timeout_s=timeout_s, device=device)


def _summary(rows: int, ends: Counter[Ended], said: str) -> str:
    looked = ends.total() - ends[Ended.REFUSED]
    parts = [f"{looked} of {_verdicts(rows)} looked at"]
    if looked:
        parts[0] += f" with {NAME}, a finding for {ends[Ended.FOUND]}"
    if said:
        parts.append(said)
    if looked > ends[Ended.FOUND] or looked < rows:
        parts.append(_stands(rows))
    return "; ".join(parts)


def _verdicts(count: int) -> str:
    return f"{count} unsafe memory {'verdict' if count == 1 else 'verdicts'}"


def _stands(count: int) -> str:
    return "the verdict stands" if count == 1 else "the verdicts stand"
