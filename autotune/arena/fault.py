"""Says where a fault happened before the process dies of it.

``install`` puts a handler for SIGSEGV and SIGBUS into this process (a worker's child). On a fault the
handler writes one JSON line to a descriptor that is already open, restores the default action and raises
the signal again, so that the process still dies of the real signal:

    {"signal": "SIGSEGV", "address": 139912345, "inside_hole": true, "operand": "out", "offset": 0}

An address inside one of our holes is the kernel's illegal access; anywhere else the process crashed, which
may be anyone's fault. ``address`` is 0 for a signal that was sent (``kill``) rather than caused.

The handler is Python, called through ctypes, so it needs the interpreter: torch's kernels run without its
lock, and there it answers. A fault inside the interpreter or its allocator may hang or kill the process
without a line; the parent's watchdog and the wait status cover that.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading

from autotune.arena.base import ArenaError
from autotune.arena.regions import FaultSite, describe

__all__ = ["FaultSite", "describe", "install"]

SIGNALS = (signal.SIGSEGV, signal.SIGBUS)
SA_SIGINFO = 4
# siginfo_t on 64-bit Linux: si_signo, si_errno, si_code, padding, then the union that begins with si_addr.
_SI_CODE = 8
_SI_ADDR = 16

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _SigAction(ctypes.Structure):
    """``struct sigaction`` of glibc and musl on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_installed: list[object] = []  # a collected callback would be a jump into freed memory


def install(fd: int) -> None:
    """Report faults of this process to ``fd``. Call it in the child, once; a later call replaces ``fd``.

    Raises:
        ArenaError: not on 64-bit Linux, or the kernel refuses the handler.
    """
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise ArenaError("faults can be located on 64-bit Linux only")
    default = _SigAction()

    def on_fault(number: int, info: int, _context: int) -> None:
        try:
            # si_code is positive where the kernel raised the signal for an access
            caused = ctypes.c_int.from_address(info + _SI_CODE).value > 0
            address = ctypes.c_uint64.from_address(info + _SI_ADDR).value if caused else 0
            site = describe(address) if caused else None
            os.write(fd, _line(number, address, site))
        finally:
            _libc.sigaction(number, ctypes.byref(default), None)
            # Blocked while this handler runs, so it strikes as soon as it returns.
            signal.pthread_kill(threading.get_ident(), number)

    handler = _Handler(on_fault)
    action = _SigAction(handler=ctypes.cast(handler, ctypes.c_void_p).value, flags=SA_SIGINFO)
    _line(signal.SIGSEGV, 0, None)  # whatever it imports, it imports now
    for number in SIGNALS:
        if _libc.sigaction(int(number), ctypes.byref(action), None):
            raise ArenaError(f"{number.name} cannot be handled: {os.strerror(ctypes.get_errno())}")
    _installed[:] = [handler, default]


def _line(number: int, address: int, site: FaultSite | None) -> bytes:
    """One line, short enough that a pipe takes it in one piece."""
    return (
        json.dumps(
            {
                "signal": signal.Signals(number).name,
                "address": address,
                "inside_hole": site is not None,
                "operand": site.operand if site else None,
                "offset": site.offset if site else None,
            }
        ).encode()
        + b"\n"
    )
