"""A process that names modules: it imports FlashInfer, so that its parent need not.

``python -m autotune.routes.flashinfer.naming 9.0`` reads one JSON question a line and answers each with one
line, after a greeting:

    <- {"flashinfer": "0.7.2"}, or {"missing": "No module named 'tvm_ffi'"} and the end
    -> {"route": "xqa-decode", "column": {...}}
    <- {"modules": {"xqa_...": "/.../data/aot/xqa_.../xqa_....so" or null}}, or {"error": "..."}

A path is that of the built module which the library itself would load, wherever it looks for one. It ends
with its input, or when nothing was asked for a while: the library and torch take some hundred MB.
"""

from __future__ import annotations

import json
import os
import select
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.routes.flashinfer.environment import library_environment

IDLE_S = 120.0


def built(name: str) -> str | None:
    """Where the library finds the module ``name`` built; None if nowhere. Asks the library's own search."""
    from flashinfer.jit import env

    find = getattr(env, "get_aot_artifacts", None)
    if find is not None:  # 0.7: data/aot, then the packages of prebuilt modules
        return next((str(artifact.path) for artifact in find(name)), None)
    path = Path(env.FLASHINFER_AOT_DIR) / name / f"{name}.so"
    return str(path) if path.is_file() else None


def answer(question: dict[str, Any], arch: str, version: str) -> dict[str, Any]:
    """One answer; an exception of the library is part of it."""
    from autotune.routes.flashinfer.ask import ask, smallest
    from autotune.routes.flashinfer.catalogue import routes

    try:
        route = next(route for route in routes() if route.name == question["route"])
        facts = Facts("cuda", {"compute_capability": arch}, {"flashinfer": version})
        asked = ask([(route, smallest(Column.from_dict(question["column"])))], facts)
        return {"modules": {name: built(name) for name in asked}}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def main(arch: str) -> int:
    """Serve until the input ends."""
    # whatever the library prints must not mix with the answers
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    with tempfile.TemporaryDirectory(prefix="autotune-names-") as work:
        os.environ.update(library_environment(arch, Path(work)))
        os.environ.pop("FLASHINFER_DISABLE_JIT", None)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the device's memory is for those who measure
        try:
            import flashinfer
        except Exception as error:
            say({"missing": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
            return 0
        version = str(flashinfer.__version__)
        say({"flashinfer": version})
        while select.select([sys.stdin], [], [], IDLE_S)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            say(answer(json.loads(line), arch, version))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
