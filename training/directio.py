"""Writing large files past the page cache, where a copy of the data costs more than the disk's own work.

O_DIRECT wants addresses, sizes and places that are multiples of the disk's block (open(2)); so bytes are gathered in an
aligned buffer. Where a file system does not know it, writes are ordinary ones.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

BUFFER_BYTES = 8 * 1024 * 1024
"""A multiple of every block size. A file that fits in is written in the ordinary way."""


class Sink:
    """Takes the bytes of one new file, open for writing, in their order. `finish` writes what is left."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # a mapping begins at a page
        self._filled = 0
        self._direct = False

    def put(self, piece: memoryview) -> None:
        """Take bytes. Errors: OSError."""
        while piece:
            count = min(len(piece), BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = piece[:count]
            self._filled += count
            piece = piece[count:]
            if self._filled == BUFFER_BYTES:
                if not self._direct:
                    self._set_direct(True)
                self._write()

    def finish(self) -> None:
        """Write the rest, which is no whole block. Errors: OSError."""
        if self._direct:
            self._set_direct(False)
        self._write()

    def _write(self) -> None:
        left = self._buffer[: self._filled]
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._set_direct(False)  # this file system has other rules
        self._filled = 0

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            on = False
        self._direct = on
