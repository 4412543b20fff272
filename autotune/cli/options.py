"""Flags that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_DB = "sqlite:///autotune.db"
DEFAULT_OUT = Path("tuned_configs")


class SearchName(str, Enum):
    """Values of ``--strategy``."""

    EXHAUSTIVE = "exhaustive"
    ADAPTIVE = "adaptive"


Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="PROFILE",
        help="Hardware profile: cpu, h100, h200, b200, gb200, b300 or gb300. Needed unless --space is given.",
    ),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Engine profile: generic, sglang, vllm, or a file. Several, by commas, share one measurement.",
    ),
]
SpaceFile = Annotated[
    Path | None,
    typer.Option("--space", metavar="FILE", help="Search-space file instead of the profile's own."),
]
Db = Annotated[
    str,
    typer.Option(
        "--db",
        metavar="URL",
        help="Evidence database: sqlite:///FILE or postgresql://USER@HOST/NAME.",
    ),
]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder of the table, <device>.<engine>.yaml.")
]
Routes = Annotated[
    str | None,
    typer.Option(
        "--routes",
        metavar="NAME,...",
        help="Only these routes take part; another selection is another study. All if left out.",
    ),
]
_PART = "; a part of the space is a study of its own, which every later command must name alike."
Models = Annotated[str | None, typer.Option("--models", metavar="NAME,...", help="Only these models" + _PART)]
AttnTp = Annotated[str | None, typer.Option("--attn-tp", metavar="N,...", help="Only these degrees.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="PROFILE,...", help="Only these: fp32, bf16, fp8, nvfp4.")
]
QLen = Annotated[str | None, typer.Option("--q-len", metavar="N,...", help="Only these accept lengths.")]
Batch = Annotated[str | None, typer.Option("--batch", metavar="N,...", help="Only these batch sizes.")]
Kv = Annotated[
    str | None, typer.Option("--kv", metavar="N,...", help="Only the KV rows that end at these lengths.")
]
Cells = Annotated[
    Path | None,
    typer.Option(
        "--cells",
        metavar="FILE",
        help="Only the cells that FILE names, one a line, by id or as messages write them; N, the claims "
        "that the error bound counts, stays that of all cells which the other flags leave.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="End this call after 90s, 10m, 1h30m, ... (cpu: 100s if left out); "
        "a self-test that it starts with runs to its end.",
    ),
]
PlanBudget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="With --strategy adaptive: how many cells a run of 90s, 10m, 1h30m, ... would reach.",
    ),
]
Search = Annotated[
    SearchName,
    typer.Option(
        "--strategy",
        help="exhaustive: every cell, cheapest first. adaptive: the largest gains for their time first.",
    ),
]
TrafficFile = Annotated[
    Path | None,
    typer.Option(
        "--traffic",
        metavar="FILE",
        help="shapes.jsonl of an engine (AUTOTUNE_TRAFFIC): --strategy adaptive weighs cells by their calls.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
