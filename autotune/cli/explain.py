"""``autotune explain``: what the router answers for one call on this machine, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.options import Json

if TYPE_CHECKING:
    from autotune.domain.fingerprint import Facts
    from autotune.router import Router
    from autotune.router.explanation import Explanation
    from autotune.table.model import Entry, RoutingTable


def command(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A routing table.")],
    heads: Annotated[
        str, typer.Option("--heads", metavar="Q/KV/DIM", help="Per-rank heads and head_dim, such as 8/1/128.")
    ],
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests in the call.")],
    q_len: Annotated[int, typer.Option("--q-len", min=1, help="Query tokens per request.")],
    kv: Annotated[
        int | None,
        typer.Option("--kv", min=1, help="Longest total KV length; leave out as under graph capture."),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="PROFILE", help="fp32, bf16, fp8 or nvfp4 (the KV cache's).")
    ] = "bf16",
    window: Annotated[
        int | None,
        typer.Option("--window", min=0, help="window_left, where layers differ; 0: the full-context one."),
    ] = None,
    max_context: Annotated[
        int | None, typer.Option("--max-context", min=1, help="The engine's; the table's if left out.")
    ] = None,
    attest: Annotated[
        list[str],
        typer.Option("--attest", metavar="NAME", help="What the engine guarantees. Repeatable."),
    ] = [],  # noqa: B006 - the parser makes a new one
    facts: Annotated[
        str,
        typer.Option(
            "--facts",
            metavar="here|table|FILE",
            help="Compare with this machine's facts, the table's, or a file's.",
        ),
    ] = "here",
    json: Json = False,
) -> int:
    """Say what the router answers for one call on this machine, why, and on what proof.

    Exit 0 whatever the answer is, 2 if the table has no entry for these heads.
    """
    from autotune.cli.output import print_json, print_text
    from autotune.router import Router
    from autotune.table.load import load_table

    loaded = load_table(table)
    entry = _entry(loaded, table, heads, dtype, window)
    router = Router.load(table, facts=_facts(facts, loaded))
    context = max_context or entry.max_context
    found = router.explain(entry.shape, entry.dtypes, context, batch, q_len, kv, attests=frozenset(attest))
    if json:
        print_json(_json(router, found, loaded))
    else:
        print_text("\n".join(_lines(router, found, loaded, frozenset(attest))))
    return 0


def _entry(loaded: RoutingTable, table: Path, heads: str, dtype: str, window: int | None) -> Entry:
    """The entry that the flags name; one of several q_len has the same shape as the others."""
    from autotune.domain.dtypes import PROFILES

    if dtype not in PROFILES:
        raise CliError(f"--dtype {dtype}: one of {', '.join(PROFILES)}", Exit.USAGE)
    try:
        wanted = tuple(int(part) for part in heads.split("/"))
        if len(wanted) != 3:
            raise ValueError(heads)
    except ValueError:
        raise CliError(
            f"--heads {heads}: write query heads/KV heads/head_dim, such as 8/1/128", Exit.USAGE
        ) from None
    entries = [
        entry
        for entry in loaded.entries
        if (entry.shape.num_qo_heads, entry.shape.num_kv_heads, entry.shape.head_dim) == wanted
        and entry.dtypes == PROFILES[dtype]
        and window in (None, max(entry.shape.window_left, 0))
    ]
    if not entries:
        asked = f"{heads} {dtype}" + (f" --window {window}" if window is not None else "")
        known = ", ".join(dict.fromkeys(_name(entry) for entry in loaded.entries)) or "no entry at all"
        raise CliError(f"{table}: no entry for {asked}; it has {known}", Exit.USAGE)
    if len({entry.shape for entry in entries}) > 1:
        windows = ", ".join(sorted({str(max(entry.shape.window_left, 0)) for entry in entries}))
        raise CliError(f"{table}: several entries for {heads} {dtype}; add --window {windows}", Exit.USAGE)
    return max(entries, key=lambda entry: entry.max_context)


def _name(entry: Entry) -> str:
    shape, dtypes = entry.shape, entry.dtypes
    window = f" window {shape.window_left}" if shape.window_left >= 0 else ""
    heads = f"{shape.num_qo_heads}/{shape.num_kv_heads}/{shape.head_dim}"
    return f"{heads} {dtypes.q}/{dtypes.kv}/{dtypes.out}{window}"


def _json(router: Router, found: Explanation, loaded: RoutingTable) -> dict[str, Any]:
    proof = found.proof
    return {
        **found._asdict(),
        "proof": None if proof is None else {**proof._asdict(), "of": "entry"},
        "status": {"state": router.status.state, "reason": router.status.reason},
        "digest": router.digest,
        "policy": loaded.policy._asdict(),
        "unsafe": [row._asdict() for row in loaded.unsafe],
    }


def _lines(router: Router, found: Explanation, loaded: RoutingTable, attested: frozenset[str]) -> list[str]:
    from autotune.report.grid import objective_text

    lines = [
        f"{found.answer}: {found.why}",
        f"  {found.detail}",
        f"  router {router.status.state}: {router.status.reason}",
        f"  decided by {objective_text(loaded.policy)}",
    ]
    if found.speedup_low is not None:
        lines.append(f"  at least {found.speedup_low:.3f} x as fast as the fallback; {_between(loaded)}")
    if found.vs_stock is not None:
        lines.append(f"  {found.vs_stock:.3f} x as fast as what the engine calls by itself (median)")
    if (proof := found.proof) is not None:
        # a table keeps one proof an entry: which of its limits are this very cell's is not in it
        lines.append(
            f"  proof of {proof.route} in this entry: at least {proof.checks} checks a column, "
            f"{proof.launches} launches, worst error {proof.worst_error:.2g} "
            f"(fallback {proof.fallback_error:.2g})"
        )
        lines += [f"  requires {need}" for need in proof.requires]
        lines += [f"  limit in some cell of this entry: {limit}" for limit in proof.limits]
    lines += _assumed(found, attested)
    lines += [
        f"  unsafe in this table: {row.route} {row.kind} in {row.cell}: {' '.join(row.detail.split())}"
        for row in loaded.unsafe
    ]
    return lines


def _assumed(found: Explanation, attested: frozenset[str]) -> list[str]:
    """What the fallback's proof takes for granted, where the fallback is the table's own answer."""
    from autotune.router.explanation import Why

    if found.assumes is None:
        known = (Why.NOT_FASTER, Why.CANDIDATE_UNSAFE, Why.QUARANTINED, Why.REQUIRES)
        return ["  what the fallback's proof assumes: not stated in this table"] if found.why in known else []
    said = [need + ("" if need in attested else " (not attested)") for need in found.assumes]
    return [f"  the fallback's proof assumes {', '.join(said)}"] if said else []


def _between(loaded: RoutingTable) -> str:
    """What is known of the ratio in another process."""
    policy = loaded.policy
    if policy.shift is None:
        return "its shift between processes was not measured"
    return f"in another process that shifts by some {policy.shift:.2%} (tau; margin {policy.margin:g})"


def _facts(word: str, loaded: RoutingTable) -> Facts | Path:
    from autotune.hardware.collect import collect
    from autotune.hardware.errors import NoDevice

    if word == "table":
        return loaded.facts
    if word == "here":
        try:
            return collect(loaded.facts.device, threads=1)  # as of an engine with one torch thread
        except NoDevice:
            return collect(threads=1)  # another machine: the router says so
    path = Path(word)
    if not path.is_file():
        raise CliError(
            f"--facts {word}: no such file; autotune doctor --json prints what it holds", Exit.USAGE
        )
    return path
