"""The process that imports FlashInfer for a prebuild; its parent set the environment that it reads at import.

``python -m autotune.prebuild.child`` takes one JSON request on standard input and writes one JSON event a
line on standard output:

    {"event": "library", "flashinfer": ..., "commit": ..., "tvm_ffi": ...}
    {"event": "asked", "modules": {NAME: [ROUTE, ...]}}
    {"event": "present", "name": ...}
    {"event": "built", "name": ..., "seconds": ..., "bytes": ..., "sha256": ..., ...}
    {"event": "failed", "name": ..., "reason": ...}
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from autotune.domain.cell import Column
from autotune.domain.fingerprint import Facts
from autotune.prebuild import session
from autotune.prebuild.install import tvm_ffi_version
from autotune.prebuild.manifest import digest, library
from autotune.routes.flashinfer.ask import Asked, ask, pairs
from autotune.routes.flashinfer.catalogue import routes as all_routes
from autotune.routes.flashinfer.installed import no_cubins

_LOCK = threading.Lock()


class Events:
    """Writes one event a line; threads may call it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, event: str, **values: Any) -> None:
        with _LOCK:
            self._stream.write(json.dumps({"event": event, **values}) + "\n")
            self._stream.flush()


def recipe(asked: Asked, identity: str) -> str:
    """Digest of what a module is built from.

    Sources that come with the library are covered by its version; generated ones count by content.
    Include paths are left out: they say where, not what.
    """
    from flashinfer.jit import env

    spec, generated = asked.spec, Path(env.FLASHINFER_GEN_SRC_DIR)
    sha = hashlib.sha256(identity.encode())
    for flag in [*(spec.extra_cflags or []), *(spec.extra_cuda_cflags or []), *(spec.extra_ldflags or [])]:
        if not str(flag).startswith("-I"):
            sha.update(f"\0{flag}".encode())
    for source in sorted(spec.sources):
        sha.update(f"\0{Path(source).name}".encode())
        if Path(source).is_relative_to(generated):
            sha.update(Path(source).read_bytes())
    return sha.hexdigest()


def buildable(spec: Any) -> Any:
    """The library's own spec where naming used a stand-in: the launcher of kernels that are cubins.

    Its sources include a header that comes with the cubins.

    Raises:
        Exception: whatever the library raises where they are not here, and must not be downloaded.
    """
    if hasattr(spec, "build"):
        return spec
    modules: Any = importlib.import_module("flashinfer.jit.attention.modules")
    return modules.gen_trtllm_gen_fmha_module()


def _last_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [type(error).__name__])[-1][:300]


def build_one(name: str, asked: Asked, out: Path, digest_of_inputs: str, events: Events) -> None:
    """Build one module into ``out``; its objects are removed afterwards. Nothing once this process ends."""
    if session.ending():
        return
    started = time.monotonic()
    try:
        asked.spec.build()
        target = library(out, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        shutil.copyfile(asked.spec.jit_library_path, partial)
        partial.replace(target)
        shutil.rmtree(asked.spec.build_dir, ignore_errors=True)
    except Exception as error:
        if not session.ending():  # else its compiler was told to
            events("failed", name=name, reason=_last_lines(error))
        return
    events(
        "built",
        name=name,
        seconds=round(time.monotonic() - started, 1),
        bytes=target.stat().st_size,
        sha256=digest(target),
        recipe=digest_of_inputs,
        routes=sorted(asked.routes),
        head_dims=list(asked.head_dims),
    )


def main() -> int:
    """Serve one request; the exit status is 0 even where modules failed (the events say so)."""
    # whatever the library prints must not mix with the events
    events = Events(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    session.end_with_parent(request["parent"])
    columns = [Column.from_dict(entry) for entry in request["columns"]]
    facts = Facts.from_dict(request["facts"])
    chosen = [route for route in all_routes() if route.name in request["routes"]]
    try:
        import flashinfer
        from flashinfer import _build_meta
    except ImportError as error:
        events("missing", reason=f"FlashInfer cannot be imported ({error}): pip install flashinfer-python")
        return 0
    version = str(flashinfer.__version__)
    commit = str(getattr(_build_meta, "__git_commit__", "") or getattr(_build_meta, "__git_version__", ""))
    ffi = tvm_ffi_version()
    events("library", flashinfer=version, commit=commit, tvm_ffi=ffi)
    facts = Facts(facts.device, facts.hardware, {**facts.software, "flashinfer": version})
    known: dict[str, dict[str, Any]] = request["known"]
    kept = [size for module in known.values() for size in module["head_dims"]]
    asked = ask(pairs(columns, chosen, facts, selftest=request["selftest"]), facts, kept)
    events("asked", modules={name: sorted(entry.routes) for name, entry in sorted(asked.items())})
    if request["list_only"]:
        return 0
    out = Path(request["out"])
    identity = "\0".join((version, commit, ffi, request["cuda"], str(facts.hardware["compute_capability"])))
    work = []
    for name, entry in asked.items():
        try:
            entry.spec = buildable(entry.spec)
        except Exception as error:
            reason = f"{no_cubins(version)} ({_last_lines(error)})"
            events("failed", name=name, reason=reason)
            continue
        inputs = recipe(entry, identity)
        have = known.get(name)
        target = library(out, name)
        if have and have["recipe"] == inputs and target.is_file() and digest(target) == have["sha256"]:
            events("present", name=name)
            continue
        work.append((name, entry, inputs))
    # the slowest first, so that the last worker does not start it: more sources take longer
    work.sort(key=lambda item: (-len(item[1].spec.sources), item[0]))
    with ThreadPoolExecutor(max_workers=request["jobs"]) as pool:
        for name, entry, inputs in work:
            pool.submit(build_one, name, entry, out, inputs, events)
    return 0


if __name__ == "__main__":
    sys.exit(main())
