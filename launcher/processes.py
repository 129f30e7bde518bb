"""Processes that must not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie (proc(5): the state follows the name, which ends in a parenthesis)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def end_session(session: int) -> None:
    """SIGKILL for every process of a session, whatever group it made for itself (proc(5): the sixth field of stat)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(stat.parent.name), signal.SIGKILL)


def end_marked(mark: str, spared: Container[int] = ()) -> None:
    """SIGKILL for every process that was started with `mark` (NAME=value) in its environment, or forked from such."""
    for proc in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(proc.name) not in spared and mark.encode() in (proc / "environ").read_bytes().split(b"\0"):
                os.kill(int(proc.name), signal.SIGKILL)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when the thread that started it ends (prctl(2))."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
