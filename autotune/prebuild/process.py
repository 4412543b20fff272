"""Starts the process that imports FlashInfer, and reads its events."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from autotune.prebuild import session
from autotune.prebuild.errors import PrebuildError


def events(
    python: str, request: Mapping[str, Any], environment: Mapping[str, str], work: Path
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """Run ``autotune.prebuild.child`` on ``request``; yields (event, values). Leaving early ends it
    and its compilers; so does the death of this process, however it comes.

    Raises:
        PrebuildError: FlashInfer cannot be imported there, or the process died.
    """
    variables = {**os.environ, **environment}
    # the child may be another interpreter; it must find this very package, wherever it is started
    paths = [str(Path(__file__).parents[2]), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    variables.pop("FLASHINFER_DISABLE_JIT", None)
    work.mkdir(parents=True, exist_ok=True)
    log = work / "prebuild.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [python, "-m", "autotune.prebuild.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=variables,
            # python -m puts the working folder first on sys.path
            cwd=work,
            start_new_session=True,
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        ended = False
        try:
            with contextlib.suppress(BrokenPipeError):  # died at once: its status says so below
                child.stdin.write(json.dumps({**request, "parent": os.getpid()}))
                child.stdin.close()
            for line in child.stdout:
                values = json.loads(line)
                event = values.pop("event")
                if event == "missing":
                    raise PrebuildError(values["reason"])
                yield event, values
            ended = True
        finally:
            if not ended:
                session.end(child.pid)
    if child.returncode:
        last = [text.strip() for text in log.read_text().splitlines() if text.strip()][-1:]
        raise PrebuildError(
            f"the build process ended with status {child.returncode}: {''.join(last)} (log: {log})"
        )
