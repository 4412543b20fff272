"""What the fork server imports once, so that every child starts with torch in memory.

torch only: a process that has initialised CUDA cannot be forked, and importing FlashInfer initialises it.
Importing this module anywhere but in a fork server that :mod:`autotune.worker.process` started does
nothing but define names.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import warnings

# Set by the parent around the start of the fork server: the parent's pid.
PARENT_VARIABLE = "AUTOTUNE_FORK_SERVER_PARENT"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

server_pid: int | None = None


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that made it ends; Linux only.

    Args:
        parent: pid of the parent. If it is no longer ours it died before the request: exit at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def inherit_orphans() -> None:
    """Have the kernel make this process the parent of descendants that lose theirs; Linux only.

    In a child it keeps what a route started, whatever session that moved to, below that child; in the fork
    server it gathers what a dead child left behind. Without it such processes would escape us, no more.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


_parent = os.environ.pop(PARENT_VARIABLE, None)
if _parent is not None:
    # Blocked until now: a Ctrl-C is the parent's to handle, not ours.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with_parent(int(_parent))
    server_pid = os.getpid()
    inherit_orphans()
    # of the fork server, about each orphan that it buries
    warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")

    import torch

    # One thread, before anything starts a pool: OpenMP's pool does not survive a fork.
    torch.set_num_threads(1)
    # The child's own code, standard library only.
    import autotune.worker.process  # noqa: F401

    # Children collect garbage between jobs: not through everything that torch brought.
    gc.collect()
    gc.freeze()
