"""A certain end: a rank whose clean-up hangs leaves all the same."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from .telling import tell

LEAVE_WITHIN_S = 15.0
"""How long the clean-up of a rank may take once its work is done or has failed, before it is made to leave."""


def leave_later(code: int, within_s: float = LEAVE_WITHIN_S) -> threading.Timer:
    """Leave this process with `code` after `within_s` seconds, unless the returned timer is cancelled before."""
    timer = threading.Timer(within_s, _leave, (code, within_s))
    timer.daemon = True
    timer.start()
    return timer


def leave(code: int) -> NoReturn:
    """Leave now, without the interpreter's own clean-up.

    It may hang in threads that a user's code left behind, and torch aborts in it now and then when gloo was used.
    """
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _leave(code: int, within_s: float) -> None:
    tell(f"the clean-up hung for {within_s:g} s: leaving without it, exit code {code}")
    os._exit(code)
