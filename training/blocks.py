"""The order of samples that lie in shards, such as files far away: each node reads about its share of the bytes.

    shards, permuted, end to end   |  shard 7  | shard 2 |   shard 9   | ...
    cut into lanes                 |   lane 0    |   lane 1    |  ...
    a global batch                 its slots 0, 1, ... read lane 0, the next ones lane 1, and so on

A lane is read from its start to its end, shuffled within windows that follow one another. A node has some slots of each
global batch, the same ones in each, so it reads the lanes of those alone. The number of lanes is fixed by the spec:
the order is the same for every world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .config import DataConfig
from .errors import DataError
from .order import Indices, Order
from .permute import Permutation


class _Epoch(NamedTuple):
    """One epoch's shards, in their permuted order."""

    number: int
    ends: Indices
    """Where each ends in the sequence of all."""
    shifts: Indices
    """From a place in that sequence to the sample's id, by shard."""


def order_of(dataset: Any, seed: int, config: DataConfig, global_size: int) -> Order:
    """The order of a dataset's samples: that of blocks when it has `shard_sizes`. Errors: those of BlockOrder."""
    sizes = getattr(dataset, "shard_sizes", None)
    if sizes is None:
        return Order(len(dataset), seed, config.shuffle)
    return BlockOrder(len(dataset), seed, config.shuffle, sizes, global_size, config.lanes, config.window)


@dataclass(frozen=True)
class BlockOrder(Order):
    """Epoch e's order of sharded samples, for global batches of one size. `n` is the number of all samples.

    Seeking takes O(log shards), memory O(shards). Errors: DataError for sizes below 0, or that do not add up to n.
    """

    shard_sizes: Sequence[int] = ()
    """Samples of each shard; their ids follow one another."""
    global_size: int = 1
    """Samples of a global batch."""
    lanes: int = 64
    """More nodes than lanes share lanes, and read bytes twice. No more than global_size are used."""
    window: int = 16384
    """Samples among which one is shuffled, besides its shard's place."""
    _memory: list[_Epoch] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = np.asarray(self.shard_sizes)
        if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (sizes < 0).any():
            raise DataError(f"shard_sizes: {self.shard_sizes!r:.80} is no list of sizes; give one whole number a shard")
        if sizes.sum() != self.n:
            raise DataError(
                f"shard_sizes: {len(sizes)} shards hold {sizes.sum()} samples, but the dataset's length is {self.n}"
            )
        if min(self.global_size, self.lanes, self.window) < 1:
            raise DataError(
                f"lanes {self.lanes}, window {self.window}, global batch {self.global_size}: give at least 1"
            )

    def at(self, epoch: int, positions: Indices) -> Indices:
        """Samples at any positions (int64, each in 0..n-1) of an epoch; same shape."""
        if not self.shuffle or self.n < 2:
            return positions
        lane, place = self._lane_of(positions.ravel())
        places = self._starts[lane] + self._shuffled(epoch, lane, place)
        order = self._epoch(epoch)
        shard = np.searchsorted(order.ends, places, side="right")
        return (places + order.shifts[shard]).reshape(positions.shape)

    @cached_property
    def _slots(self) -> Indices:
        """The first slot of each lane in a global batch, and at last the batch's size."""
        used = min(self.lanes, self.global_size)
        return np.array([lane * self.global_size // used for lane in range(used + 1)], dtype=np.int64)

    @cached_property
    def _tails(self) -> Indices:
        """Where the lanes' parts of an epoch's last, smaller batch begin in it, and at last its size."""
        used, rest = len(self._slots) - 1, self.n % self.global_size
        return np.array([lane * rest // used for lane in range(used + 1)], dtype=np.int64)

    @cached_property
    def _lengths(self) -> Indices:
        """A lane has what its slots take of all whole batches, and its part of the last one."""
        return self.n // self.global_size * np.diff(self._slots) + np.diff(self._tails)

    @cached_property
    def _starts(self) -> Indices:
        return np.concatenate([[0], np.cumsum(self._lengths)[:-1]])

    def _lane_of(self, positions: Indices) -> tuple[Indices, Indices]:
        """The lane that a position reads, and the how-manieth sample of the lane it is."""
        batch, slot = positions // self.global_size, positions % self.global_size
        whole = batch < self.n // self.global_size
        lane = np.where(
            whole,
            np.searchsorted(self._slots, slot, side="right") - 1,
            np.searchsorted(self._tails, slot, side="right") - 1,
        )
        first = np.where(whole, self._slots[lane], self._tails[lane])
        return lane, batch * np.diff(self._slots)[lane] + slot - first

    @cached_property
    def _windows(self) -> tuple[Indices, Indices]:
        """Of each lane: the size of its smaller windows, and how many have one sample more. Even, so none is tiny."""
        counts = np.maximum(-(-self._lengths // self.window), 1)
        return self._lengths // counts, self._lengths % counts

    def _shuffled(self, epoch: int, lane: Indices, place: Indices) -> Indices:
        """The place in the lane after shuffling its windows."""
        smaller, more = (array[lane] for array in self._windows)
        large = more * (smaller + 1)
        in_large = place < large
        sizes = smaller + in_large
        beyond = np.where(in_large, place, place - large)
        number, offset = beyond // np.maximum(sizes, 1), beyond % np.maximum(sizes, 1)
        names = ((number + np.where(in_large, 0, more)) * 0x9E3779B1 + lane * 0x85EBCA6B) & 0xFFFFFFFF
        largest = int((self._windows[0] + (self._windows[1] > 0)).max())
        family = Permutation(largest, f"window/{self.seed}/{epoch}")
        shuffled: Indices = place - offset + family.at(offset, sizes, names.astype(np.uint32))
        return shuffled

    def _epoch(self, number: int) -> _Epoch:
        """The last epoch asked for is kept: it takes a moment where there are many shards."""
        if not self._memory or self._memory[0].number != number:
            sizes = np.asarray(self.shard_sizes, dtype=np.int64)
            ids = np.cumsum(sizes) - sizes
            turn = Permutation(len(sizes), f"shards/{self.seed}/{number}").at(np.arange(len(sizes)))
            ends = np.cumsum(sizes[turn])
            self._memory[:] = [_Epoch(number, ends, ids[turn] - (ends - sizes[turn]))]
        return self._memory[0]
