"""Which modules a route asks for in a column: the installed library's own answer, had from another process.

This process imports neither FlashInfer nor its compiled code: it may fork workers that do.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autotune.domain.cell import Column

# Importing torch and FlashInfer from a cold disk took 20 s; a question takes 50 ms to 2 s.
ANSWER_S = 180.0


class LibraryError(RuntimeError):
    """The installed FlashInfer cannot be asked; the message says why, in one line.

    ``unusable`` is True where it cannot even be imported, so that no route of it can run either.
    """

    def __init__(self, message: str, *, unusable: bool = False) -> None:
        super().__init__(message)
        self.unusable = unusable


class _DiedError(LibraryError):
    """The process that answers is gone."""


class Library:
    """The FlashInfer of one interpreter, asked on behalf of one kind of device.

    The process that answers is started by the first question, ends when it is idle for two minutes, and is
    started again by the next one. Answers are kept by what they depend on.

    Args:
        arch: compute capability of the device that modules are for, such as ``"9.0"``.
        python: the interpreter that has FlashInfer.
    """

    def __init__(self, arch: str, python: str = sys.executable) -> None:
        self._arch = arch
        self._python = python
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._buffer = b""
        self._known: dict[tuple[Any, ...], Mapping[str, str | None] | LibraryError] = {}
        self._unusable: LibraryError | None = None

    def modules(self, route: str, column: Column) -> Mapping[str, str | None]:
        """Modules that ``route`` loads for ``column``: name -> path of the built one, None if there is none.

        Raises:
            LibraryError: FlashInfer cannot be imported, its Python layer refuses the column, or it died.
        """
        key = (route, column.shape, column.dtypes, column.q_len)
        with self._lock:
            if self._unusable is not None:
                raise self._unusable
            if key not in self._known:
                try:
                    self._known[key] = self._ask(route, column)
                except LibraryError as error:
                    if error.unusable:
                        self._unusable = error
                    self._known[key] = error
            found = self._known[key]
        if isinstance(found, LibraryError):
            raise found
        return found

    def _ask(self, route: str, column: Column) -> Mapping[str, str | None]:
        fresh = self._child is None or self._child.poll() is not None
        if fresh:
            self._start()
        question = json.dumps({"route": route, "column": column.to_dict()}) + "\n"
        try:
            answer = self._answer(question)
        except _DiedError:
            if fresh:
                raise
            self._start()  # it was about to end, idle, when it was asked
            answer = self._answer(question)
        if "error" in answer:
            raise LibraryError(f"FlashInfer refuses {column} for {route}: {answer['error']}")
        modules: dict[str, str | None] = answer["modules"]
        return modules

    def _answer(self, question: str) -> dict[str, Any]:
        assert self._child is not None and self._child.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; the answer's absence says so
            self._child.stdin.write(question.encode())
            self._child.stdin.flush()
        return self._read()

    def _start(self) -> None:
        self.close()
        root = str(Path(__file__).resolve().parents[3])
        paths = [root, os.environ.get("PYTHONPATH", "")]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has died
        self._child = subprocess.Popen(
            [self._python, "-m", "autotune.routes.flashinfer.naming", self._arch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
            # python -m puts the working folder first on sys.path; and Ctrl-C is the parent's to handle
            cwd=root,
            start_new_session=True,
        )
        atexit.register(self.close)
        greeting = self._read()
        if "missing" in greeting:
            raise LibraryError(f"FlashInfer cannot be imported ({greeting['missing']})", unusable=True)

    def _read(self) -> dict[str, Any]:
        assert self._child is not None and self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], ANSWER_S)[0]:
                self.close()
                raise LibraryError(f"FlashInfer did not name a module within {ANSWER_S:.0f} s")
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise _DiedError(f"the process that names FlashInfer's modules died: {self._last_words()}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        assert self._child is not None and self._errors is not None
        status = self._child.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), f"exit status {status}")

    def close(self) -> None:
        """End the process; the next question starts another."""
        child, self._child = self._child, None
        if child is not None:
            atexit.unregister(self.close)
            if child.stdin is not None:
                with contextlib.suppress(OSError):  # a question that it did not read
                    child.stdin.close()  # it ends with its input, and removes what it wrote
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        self._buffer = b""


@cache
def library(arch: str) -> Library:
    """The FlashInfer of this interpreter, for devices of one compute capability."""
    return Library(arch)
