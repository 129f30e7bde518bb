"""Processes that must not outlive their parent."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when the thread that started it ends (prctl(2))."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
