"""Keyed permutations of 0..n-1 for any n, evaluated at any positions alone: no list is built, nothing is remembered."""

from __future__ import annotations

import hashlib
import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Names = npt.NDArray[np.uint32]
_Wide = npt.NDArray[np.uint64]

LARGEST = 2**62
"""Largest n: the sum of two halves still fits 32 bits."""
_ROUNDS, _ROUNDS_WHEN_SMALL, _SMALL = 8, 24, 256
"""Rounds from n = 256 on, and below, where a round has few random choices: with 16, some orders of 5 come measurably
more often than others; with 24, all orders of 7 are equally likely as far as 600,000 keys can tell."""
_CHUNK = 8192
"""Positions that pass through the rounds together: their buffers, 32 and 64 KiB each, stay in the core's caches."""
_SHIFT = np.uint32(15)
_UPPER = int(sys.byteorder == "little")
"""Where the upper half of a 64-bit word lies when it is seen as two of 32."""


class Permutation:
    """A bijection on 0..n-1 that is a pure function of a text key.

    A Feistel network over Z_a x Z_b, a*b barely above n, then cycle walking back into 0..n-1 (Black and Rogaway 2002,
    "Ciphers with Arbitrary Finite Domains", sections 4 and 5): each round adds a hash of one half to the other.

    Errors: ValueError for an n outside 1..2^62.
    """

    def __init__(self, n: int, key: str) -> None:
        if not 1 <= n <= LARGEST:
            raise ValueError(f"a permutation of {n} numbers; 1 to 2^62 are possible")
        root = math.isqrt(n - 1) + 1
        self._n = n
        self._low = root + root % 2  # even: an odd a*b would give even permutations alone
        self._high = max(2, -(-n // self._low))
        rounds = _ROUNDS if n >= _SMALL else _ROUNDS_WHEN_SMALL
        digest = hashlib.shake_256(key.encode()).digest(16 * rounds)
        keys = np.frombuffer(digest, dtype="<u4").astype(np.uint32).reshape(rounds, 4)
        keys[:, 1:] |= np.uint32(1)  # odd factors lose nothing of what they multiply
        self._keys = [tuple(row) for row in keys]
        self._sizes = [(np.uint32(size), np.uint64(size)) for size in (self._high, self._low)]

    def at(self, positions: Indices, sizes: Indices | None = None, names: Names | None = None) -> Indices:
        """Images of positions (int64, each in 0..n-1), same shape. Time is O(len(positions)).

        With `sizes` (1..n) and `names`, both of positions' shape, the permutation is a family: an element goes through
        the member with its name, a bijection on 0..size-1. One name has one size.
        """
        flat = positions.ravel()
        out = np.empty(flat.shape, dtype=np.int64)
        for start in range(0, len(flat), _CHUNK):
            part = slice(start, start + _CHUNK)
            limits = np.uint64(self._n) if sizes is None else sizes.ravel()[part].astype(np.uint64)
            own = None if names is None else names.ravel()[part]
            out[part] = self._walk(flat[part].astype(np.uint64), limits, own)
        return out.reshape(positions.shape)

    def _walk(self, values: _Wide, limits: Any, names: Names | None) -> _Wide:
        """Cycle walking: what leaves its range goes through the network again until it is back."""
        out = self._network(values, names)
        outside = np.flatnonzero(out >= limits)
        while outside.size:
            again = self._network(out[outside], None if names is None else names[outside])
            out[outside] = again
            outside = outside[again >= (limits if limits.ndim == 0 else limits[outside])]
        return out

    def _network(self, values: _Wide, names: Names | None) -> _Wide:
        """A bijection on 0..a*b-1. Works in place, on halves of 32 bits."""
        wide = values // np.uint64(self._low)
        high = wide.astype(np.uint32)
        wide *= np.uint64(self._low)
        low = np.subtract(values, wide, out=wide).astype(np.uint32)
        hashed, shifted = np.empty_like(low), np.empty_like(low)
        upper = wide.view(np.uint32)[_UPPER::2]
        for number, (key, first, second, spread) in enumerate(self._keys):
            one, other = (high, low) if number % 2 else (low, high)
            size, wide_size = self._sizes[number % 2]
            np.add(one, key, out=hashed)
            if names is not None:
                hashed += names * spread
            hashed *= first
            np.right_shift(hashed, _SHIFT, out=shifted)
            hashed ^= shifted
            hashed *= second
            np.multiply(hashed, wide_size, out=wide, dtype=np.uint64)
            other += upper  # the product's upper half is the hash, scaled to 0..size-1 (Lemire 2019, section 2)
            np.subtract(other, size, out=shifted)
            np.minimum(other, shifted, out=other)  # modulo size: below it the subtraction wrapped around
        np.multiply(high, np.uint64(self._low), out=wide, dtype=np.uint64)
        wide += low
        return wide
