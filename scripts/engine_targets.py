"""Writes what the engine plugins rely on, from engines unpacked somewhere: tests/data/engine-targets.json.

    pip download --no-deps sglang==0.5.23 vllm==0.33.0 -d wheels
    pip install --no-deps --target sglang-site wheels/sglang-*.whl        (the same for vllm)
    python scripts/engine_targets.py --sglang sglang-site --vllm vllm-site

Names, parameters and digests only: no text of an engine is kept. Run it when an engine's release is adopted;
then read what changed, and put the printed fingerprint into ``KNOWN`` of the plugin.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import Any

from autotune.engines import sglang, vllm
from autotune.engines.outline import fingerprint, outline, parameters

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "engine-targets.json"
REGISTRY = "sglang/srt/plugins/hook_registry.py"


def target(site: Path, package: str, module: str, cls: str, methods: tuple[str, ...]) -> dict[str, Any]:
    """One plugin's target as it is under ``site``."""
    source = (site / Path(*module.split("."))).with_suffix(".py").read_text("utf-8")
    found = outline(source, cls, methods)
    return {
        "version": version(site, package),
        "module": module,
        "class": cls,
        "methods": found,
        "fingerprint": fingerprint(found),
    }


def registry(site: Path) -> dict[str, Any]:
    """Parameters of SGLang's ``HookRegistry.register`` and the members of ``HookType``."""
    tree = ast.parse((site / REGISTRY).read_text("utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    register = next(
        node
        for node in classes["HookRegistry"].body
        if isinstance(node, ast.FunctionDef) and node.name == "register"
    )
    members = [
        name.id
        for node in classes["HookType"].body
        if isinstance(node, ast.Assign)
        for name in node.targets
        if isinstance(name, ast.Name)
    ]
    return {"register": parameters(register), "types": members}


def version(site: Path, package: str) -> str:
    """From the unpacked wheel's own folder name."""
    found = sorted(site.glob(f"{package}-*.dist-info"))
    if not found:
        raise SystemExit(f"{site}: no {package} is unpacked here")
    return found[0].name.removesuffix(".dist-info").partition("-")[2]


def collect(site_of_sglang: Path | None, site_of_vllm: Path | None) -> dict[str, Any]:
    """What is to be written for the engines that are here."""
    made: dict[str, Any] = {}
    if site_of_sglang is not None:
        made["sglang"] = target(site_of_sglang, "sglang", sglang.MODULE, sglang.CLASS, sglang.RELIED_ON) | {
            "registry": registry(site_of_sglang)
        }
    if site_of_vllm is not None:
        made["vllm"] = target(site_of_vllm, "vllm", vllm.MODULE, vllm.CLASS, vllm.RELIED_ON)
    return made


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Writes tests/data/engine-targets.json.")
    parser.add_argument("--sglang", type=Path, metavar="SITE")
    parser.add_argument("--vllm", type=Path, metavar="SITE")
    given = parser.parse_args()
    stored = json.loads(DATA.read_text("utf-8")) if DATA.is_file() else {}
    stored |= collect(given.sglang, given.vllm)
    DATA.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
    for name, found in stored.items():
        sys.stdout.write(f"{name} {found['version']}: {found['fingerprint']}\n")


if __name__ == "__main__":
    main()
