"""One launch at a time is at work on a run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from training.runfolder import RunFolder

from .errors import LaunchError

_held: dict[Path, int] = {}
"""Descriptors by folder, open for as long as this process lives; the kernel gives the locks back with it."""


def hold(run: RunFolder) -> None:
    """Keep others from starting an attempt of the run while this process lives. Errors: LaunchError if one is at it.

    Where a file system has no locks, nothing is kept; two attempts then fence each other.
    """
    if run.path in _held:
        return
    try:
        descriptor = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # whoever reads the folder next says it better
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LaunchError(f"{run.run_id}: another launch is at work on it, and it has not ended yet") from None
    except OSError:
        os.close(descriptor)
        return
    _held[run.path] = descriptor
