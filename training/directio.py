"""Writing large files past the page cache, where a copy of the data costs more than the disk's own work.

O_DIRECT wants addresses, sizes and places that are multiples of the disk's block (open(2)); so bytes are gathered in an
aligned buffer. Where a file system does not know it, writes are ordinary ones.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor

BUFFER_BYTES = 8 * 1024 * 1024
"""A multiple of every block size. A file that fits in is written in the ordinary way."""


class Sink:
    """Takes the bytes of one new file, open for writing, in their order. `finish` writes what is left.

    While one buffer is written by a thread, the next bytes are taken, and hashed by the caller, into the other.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffers = [memoryview(mmap.mmap(-1, BUFFER_BYTES)) for _ in range(2)]  # a mapping begins at a page
        self._filled = 0
        self._direct = False
        self._writer: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def put(self, piece: memoryview) -> None:
        """Take bytes. Errors: OSError of a write that was begun before."""
        while piece:
            count = min(len(piece), BUFFER_BYTES - self._filled)
            self._buffers[0][self._filled : self._filled + count] = piece[:count]
            self._filled += count
            piece = piece[count:]
            if self._filled == BUFFER_BYTES:
                self._hand_over()

    def finish(self) -> None:
        """Write the rest, which is no whole block. Errors: OSError."""
        self._await()
        if self._direct:
            self._set_direct(False)
        self._write(self._buffers[0][: self._filled])

    def close(self) -> None:
        """End the thread, whatever it is at."""
        if self._thread is not None:
            self._thread.shutdown()

    def _hand_over(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
            self._set_direct(True)
        self._await()
        self._writer = self._thread.submit(self._write, self._buffers[0])
        self._buffers.reverse()
        self._filled = 0

    def _await(self) -> None:
        if self._writer is not None:
            self._writer.result()

    def _write(self, left: memoryview) -> None:
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._set_direct(False)  # this file system has other rules

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            on = False
        self._direct = on
