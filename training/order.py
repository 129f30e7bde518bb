"""Order of samples and who takes which: pure functions of (seed, epoch, position). No list is ever built.

The run's whole place in its data is one integer, `samples`: how many samples all ranks together have consumed since
the run began. Neither the world size nor the number of loader workers enters the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .permute import Indices as Indices
from .permute import Permutation
from .schedule import BatchPlan

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

        Errors: ValueError for more than 2^62 samples.
        """
        if not self.shuffle or self.n < 2:
            return positions
        return Permutation(self.n, f"order/{self.seed}/{epoch}").at(positions)


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
    position: int
    """Place of the first sample among all that the run consumes, from 0; the others follow. No meaning when idle."""


@dataclass(frozen=True)
class Slots:
    """Cuts the epochs of an order into steps, and each step into the ranks' shares.

    A step that starts at position p of an epoch of N samples covers n = min(global_size, N - p) positions. Rank r of R
    takes the positions p + floor(n r / R) up to p + floor(n (r + 1) / R), in micro-batches of plan.per_rank.

    With `filled`, an epoch's last, smaller n fills one micro-batch after the other, and rank r takes those from number
    r plan.accumulate on, as of any other n: each is the same one whatever rank takes it.
    """

    order: Order
    plan: BatchPlan
    rank: int
    drop_last: bool = False
    filled: bool = False

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
        parts = list(picked.reshape(steps * plan.accumulate, plan.per_rank))
        for step in range(steps):
            begin = samples + step * size
            micro_batches = parts[step * plan.accumulate : (step + 1) * plan.accumulate]
            yield Share(micro_batches, False, size, begin + size, begin + self.rank * own)

    def _tail(self, epoch: int, position: int, samples: int) -> Share:
        count, plan = self.epoch_samples - position, self.plan
        start, stop = count * self.rank // plan.world_size, count * (self.rank + 1) // plan.world_size
        if self.filled:
            own = plan.per_rank * plan.accumulate
            start, stop = min(count, own * self.rank), min(count, own * (self.rank + 1))
        idle = start == stop
        if idle:
            start, stop = 0, 1
        picked = self.order.indices(epoch, position + start, position + stop)
        parts = [picked[i : i + plan.per_rank] for i in range(0, len(picked), plan.per_rank)]
        return Share(parts, idle, count, samples + count, samples + start)
