"""Writing large files past the page cache, where a copy of the data costs more than the disk's own work.

O_DIRECT wants addresses, sizes and places that are multiples of the disk's block (open(2)). `buffers` lays out the
copies of a state so; other bytes, and those on a file system that does not know it, are written in the ordinary way.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np

PAGE = mmap.PAGESIZE
"""A multiple of every block size."""
LEAST_BYTES = 1024 * 1024
"""Fewer bytes than this at once are written in the ordinary way."""


class Sink:
    """Takes the bytes of one new file, open for writing, in their order."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._direct, self._possible = False, True
        self._end = 0

    def put(self, piece: memoryview) -> None:
        """Write bytes. Errors: OSError."""
        pages = self._whole_pages(piece)
        for part, direct in ((piece[:pages], True), (piece[pages:], False)):
            if part:
                self._set_direct(direct)
                self._write(part)
        self._end += len(piece)

    def _whole_pages(self, piece: memoryview) -> int:
        """How many of the bytes, from the first on, may go past the page cache."""
        if not self._possible or len(piece) < LEAST_BYTES or self._end % PAGE:
            return 0
        address = np.frombuffer(piece, np.uint8).__array_interface__["data"][0]
        return 0 if address % PAGE else len(piece) // PAGE * PAGE

    def _write(self, left: memoryview) -> None:
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._give_up()  # this file system has other rules, or the last write ended within a block

    def _set_direct(self, on: bool) -> None:
        if on == self._direct or (on and not self._possible):
            return
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._possible = False
        else:
            self._direct = on

    def _give_up(self) -> None:
        self._set_direct(False)
        self._possible = False
