"""A file's content on its way to storage: hashed in the same pass, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

_CHUNK_BYTES = 16 * 1024 * 1024
_READ_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Written:
    """What was written to one file."""

    size: int
    """Bytes."""
    xxh3: str
    """Hexadecimal 128-bit XXH3 digest of the content: it finds damage, at the speed of memory, not forgery."""


def pour(chunks: Iterable[bytes | memoryview], put: Callable[[memoryview], Any]) -> Written:
    """Hash and write in one pass, while a piece is still in the processor's cache."""
    total, size = xxhash.xxh3_128(), 0
    for piece in _pieces(chunks):
        total.update(piece)
        put(piece)
        size += len(piece)
    return Written(size, total.hexdigest())


def digest_of(content: bytes) -> str:
    """Hexadecimal digest of bytes, as in `Written`."""
    return str(xxhash.xxh3_128_hexdigest(content))


def digest_of_file(read_into: Callable[[memoryview], int | None]) -> str:
    """The same for what `read_into` puts into memory, up to its end."""
    total, memory = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    while count := read_into(memory):
        total.update(memory[:count])
    return str(total.hexdigest())


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]
