"""Exit codes, part of the public interface: deployments branch on them."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a command's exit code means."""

    DONE = 0
    FAILED = 1  # database, disk, lock
    USAGE = 2  # flag, YAML
    WRONG_MACHINE = 3  # this machine is not that GPU
    CONTROL_FAILED = 4  # a control failed, nothing was proven
    NO_SAFE_ROUTE = 5  # finished, but some cells have no safe route
    INTERRUPTED = 130  # resumable


class CliError(Exception):
    """One line for the user (what, where, what to do) and the exit code it ends with."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.code = code
