"""Order of samples and who takes which: pure functions of (seed, epoch, position). No list is ever built.

The run's whole place in its data is one integer, `samples`: how many samples all ranks together have consumed since
the run began. Neither the world size nor the number of loader workers enters the order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .schedule import BatchPlan

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_ROUNDS = 12
"""With 8, some samples of a five-sample epoch come first measurably more often; 12 pass the same test."""
_BLOCK = 8192
"""Positions of one rank that are permuted in one call: numpy's cost per call is then spread over many steps."""


@dataclass(frozen=True)
class Order:
    """Epoch e's order of `n` samples: a permutation of 0..n-1 keyed by (seed, e), evaluated at any position alone."""

    n: int
    seed: int
    shuffle: bool = True

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Samples at positions start..stop-1 of an epoch, as int64 of shape (stop - start,)."""
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, epoch: int, positions: Indices) -> Indices:
        """Samples at any positions (int64, each in 0..n-1) of an epoch; same shape. O(len(positions)) time and memory.

        A Feistel network over the smallest power of two >= n, then cycle walking back into 0..n-1 (Black and
        Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 4): fewer than two rounds of walking on average.
        """
        if not self.shuffle or self.n < 2:
            return positions
        bits = (self.n - 1).bit_length()
        keys = _round_keys(self.seed, epoch)
        out = _feistel(positions.ravel().astype(np.uint64), bits, keys)
        outside = np.flatnonzero(out >= self.n)
        while outside.size:
            out[outside] = _feistel(out[outside], bits, keys)
            outside = outside[out[outside] >= self.n]
        return out.astype(np.int64).reshape(positions.shape)


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    digest = hashlib.shake_256(f"order/{seed}/{epoch}".encode()).digest(8 * _ROUNDS)
    return [np.uint64(key) for key in np.frombuffer(digest, dtype="<u8")]


def _feistel(values: _Words, bits: int, keys: list[np.uint64]) -> _Words:
    """A bijection on `bits`-bit numbers: each round XORs one half with a hash of the other, in turn."""
    low_bits = np.uint64(bits - bits // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            low ^= _mix(high ^ key) & low_mask
        else:
            high ^= _mix(low ^ key) & high_mask
    return (high << low_bits) | low


def _mix(words: _Words) -> _Words:
    """The 64-bit finalizer of MurmurHash3 (Appleby, public domain): every input bit reaches every output bit."""
    words ^= words >> np.uint64(33)
    words *= np.uint64(0xFF51AFD7ED558CCD)
    words ^= words >> np.uint64(33)
    words *= np.uint64(0xC4CEB9FE1A85EC53)
    words ^= words >> np.uint64(33)
    return words


class Share(NamedTuple):
    """What one rank does in one optimizer step."""

    micro_batches: list[Indices]
    """Sample indices of each micro-batch, at most plan.per_rank each. Never empty: see `idle`."""
    idle: bool
    """The tail batch had no sample for this rank: it computes on one sample of the epoch, with weight 0."""
    global_size: int
    """Samples of the whole step, all ranks together."""
    samples: int
    """Samples consumed by all ranks when the step is done: the state to resume from."""


@dataclass(frozen=True)
class Slots:
    """Cuts the epochs of an order into steps, and each step into the ranks' shares.

    A step that starts at position p of an epoch of N samples covers n = min(global_size, N - p) positions. Rank r of R
    takes the positions p + floor(n r / R) up to p + floor(n (r + 1) / R), in micro-batches of plan.per_rank.
    """

    order: Order
    plan: BatchPlan
    rank: int
    drop_last: bool = False

    @property
    def epoch_samples(self) -> int:
        """Samples used in one epoch: all, or with drop_last whole global batches only. May be 0."""
        size = self.plan.global_size
        return self.order.n // size * size if self.drop_last else self.order.n

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps in one epoch."""
        return -(-self.epoch_samples // self.plan.global_size)

    def shares(self, samples: int) -> Iterator[Share]:
        """This rank's shares from the state `samples` on, without end. Seeking costs nothing.

        Errors: ValueError when an epoch has no sample.
        """
        if not self.epoch_samples:
            raise ValueError("an epoch has no sample")
        while True:
            epoch, position = divmod(samples, self.epoch_samples)
            whole = (self.epoch_samples - position) // self.plan.global_size
            if whole:
                block = min(whole, max(1, _BLOCK // (self.plan.global_size // self.plan.world_size)))
                yield from self._whole_steps(epoch, position, block, samples)
                samples += block * self.plan.global_size
            else:
                yield self._tail(epoch, position, samples)
                samples += self.epoch_samples - position

    def _whole_steps(self, epoch: int, position: int, steps: int, samples: int) -> Iterator[Share]:
        size, plan = self.plan.global_size, self.plan
        own = plan.per_rank * plan.accumulate
        first = position + self.rank * own
        starts = first + size * np.arange(steps, dtype=np.int64)
        picked = self.order.at(epoch, starts[:, None] + np.arange(own, dtype=np.int64))
        cut = picked.reshape(steps, plan.accumulate, plan.per_rank)
        for step in range(steps):
            yield Share(list(cut[step]), False, size, samples + (step + 1) * size)

    def _tail(self, epoch: int, position: int, samples: int) -> Share:
        count, plan = self.epoch_samples - position, self.plan
        start, stop = count * self.rank // plan.world_size, count * (self.rank + 1) // plan.world_size
        idle = start == stop
        if idle:
            start, stop = 0, 1
        own = self.order.indices(epoch, position + start, position + stop)
        parts = [own[i : i + plan.per_rank] for i in range(0, len(own), plan.per_rank)]
        return Share(parts, idle, count, samples + count)
