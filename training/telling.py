"""A word to the user from anywhere in a rank. That it cannot be written never changes what the rank does."""

from __future__ import annotations

import sys
from contextlib import suppress


def tell(text: str) -> None:
    """A line on standard error, if it takes one: the disk that holds its file may be full."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
