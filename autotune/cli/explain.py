"""``autotune explain``: what the router answers for one call on this machine, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.exits import CliError, Exit
from autotune.cli.options import Json

if TYPE_CHECKING:
    from autotune.domain.fingerprint import Facts
    from autotune.table.model import RoutingTable


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
    max_context: Annotated[
        int | None, typer.Option("--max-context", min=1, help="The engine's; the table's if left out.")
    ] = None,
    attest: Annotated[
        list[str] | None, typer.Option("--attest", metavar="NAME", help="What the engine guarantees.")
    ] = None,
    facts: Annotated[
        str, typer.Option("--facts", metavar="here|table|FILE", help="Machine facts to compare with.")
    ] = "here",
    json: Json = False,
) -> int:
    """Explain one decision: the answer, its reason, the proof behind it."""
    from autotune.cli.output import print_json, stdout
    from autotune.domain.dtypes import PROFILES
    from autotune.router import Router
    from autotune.table.load import load_table

    if dtype not in PROFILES:
        raise CliError(f"--dtype {dtype}: one of {', '.join(PROFILES)}", Exit.USAGE)
    try:
        num_qo, num_kv, head_dim = (int(part) for part in heads.split("/"))
    except ValueError:
        raise CliError(
            f"--heads {heads}: write query heads/KV heads/head_dim, such as 8/1/128", Exit.USAGE
        ) from None
    loaded = load_table(table)
    wanted = PROFILES[dtype]
    entries = [
        entry
        for entry in loaded.entries
        if (entry.shape.num_qo_heads, entry.shape.num_kv_heads, entry.shape.head_dim)
        == (num_qo, num_kv, head_dim)
        and entry.dtypes == wanted
    ]
    if not entries:
        known = sorted(
            {
                f"{e.shape.num_qo_heads}/{e.shape.num_kv_heads}/{e.shape.head_dim} {e.dtypes.q}/{e.dtypes.kv}"
                for e in loaded.entries
            }
        )
        raise CliError(f"{table}: no entry for {heads} {dtype}; it has {', '.join(known)}", Exit.USAGE)
    router = Router.load(table, facts=_facts(facts, loaded))
    shape = entries[0].shape
    context = max_context or max(entry.max_context for entry in entries)
    found = router.explain(shape, wanted, context, batch, q_len, kv, attests=frozenset(attest or ()))
    proof = found.proof
    if json:
        print_json(
            {
                "answer": found.answer,
                "why": found.why,
                "detail": found.detail,
                "proven": found.proven,
                "use_decode": found.use_decode,
                "speedup_low": found.speedup_low,
                "vs_stock": found.vs_stock,
                "status": {"state": router.status.state, "reason": router.status.reason},
                "digest": router.digest,
                "proof": None
                if proof is None
                else {
                    "route": proof.route,
                    "checks": proof.checks,
                    "launches": proof.launches,
                    "worst_error": proof.worst_error,
                    "fallback_error": proof.fallback_error,
                    "requires": list(proof.requires),
                    "limits": list(proof.limits),
                },
            }
        )
        return 0
    lines = [
        f"{found.answer}: {found.why}",
        f"  {found.detail}",
        f"  router {router.status.state}: {router.status.reason}",
    ]
    if found.speedup_low is not None:
        lines.append(f"  at least {found.speedup_low:.3f} x as fast as the fallback")
    if found.vs_stock is not None:
        lines.append(f"  {found.vs_stock:.3f} x as fast as what the engine calls by itself (median)")
    if proof is not None:
        lines.append(
            f"  proof of {proof.route}: {proof.checks} checks, {proof.launches} launches, worst error "
            f"{proof.worst_error:.2g} (fallback {proof.fallback_error:.2g})"
        )
        lines += [f"  requires {need}" for need in proof.requires] + [
            f"  limit: {limit}" for limit in proof.limits
        ]
    for item in loaded.unsafe:
        lines.append(f"  unsafe elsewhere in this table: {item.route} {item.kind} in {item.cell}")
    stdout.print("\n".join(lines), markup=False)
    return 0


def _facts(word: str, loaded: RoutingTable) -> Facts | Path:
    from autotune.hardware.collect import collect

    if word == "here":
        return collect(loaded.facts.device)
    if word == "table":
        return loaded.facts
    path = Path(word)
    if not path.is_file():
        raise CliError(f"--facts {word}: no such file; autotune doctor --json writes one", Exit.USAGE)
    return path
