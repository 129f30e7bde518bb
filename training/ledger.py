"""The ledger of samples: two hashes of what a run has consumed, small enough to stand in every checkpoint.

    order  sum over all samples consumed of g(position in the run, id)
    set    sum over all samples consumed of h(epoch, id), whatever their order

Both are sums modulo 2^64, in two lanes with keys of their own. So each rank adds up what it was really given, the parts
of all ranks make the run's total, and neither the world size nor where the run was interrupted enters it. They find
loss, repetition and disorder, not a forger who knows them. Free of torch: `launch verify` derives the same from a spec.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from .blocks import BlockOrder
from .order import Order, Share, Slots

FORMAT = 1
_Words = npt.NDArray[np.uint64]
_MASK = 2**64 - 1
_FACTORS = np.frombuffer(hashlib.shake_256(b"ledger of samples").digest(64), dtype="<u8").reshape(2, 4, 1) | np.uint64(
    1
)
"""Odd factors of each lane, two of `order` and two of `set`: for the id, and for its position or epoch."""
_BATCH = 4096
"""Ids that are hashed in one go: numpy's cost per call is then spread over many steps."""
_BLOCK = 32768
"""Positions that are derived in one go: what that needs fits a core's cache."""


@dataclass(frozen=True)
class Data:
    """What the order of a run's samples hangs on."""

    samples: int
    """Samples of the data set."""
    epoch_samples: int
    """Samples used in one epoch: fewer where the last batch is dropped."""
    global_size: int
    """Samples in one optimizer step of all ranks."""
    shuffle: bool
    seed: int
    drop_last: bool
    shards: list[list[int]] | None = None
    """Of data in shards, [size, how many such shards in a row] in their order; None: no shards."""
    lanes: int | None = None
    window: int | None = None

    @classmethod
    def of(cls, slots: Slots) -> Data:
        """What the slots of any rank say."""
        order = slots.order
        plain = cls(order.n, slots.epoch_samples, slots.plan.global_size, order.shuffle, order.seed, slots.drop_last)
        if not isinstance(order, BlockOrder):
            return plain
        shards = [[int(size), len(list(run))] for size, run in groupby(order.shard_sizes)]
        return replace(plain, shards=shards, lanes=order.lanes, window=order.window)

    def order(self) -> Order:
        """The order of the samples. Errors: DataError for shards that do not add up."""
        if self.shards is None or self.lanes is None or self.window is None:
            return Order(self.samples, self.seed, self.shuffle)
        sizes = [size for size, count in self.shards for _ in range(count)]
        return BlockOrder(self.samples, self.seed, self.shuffle, sizes, self.global_size, self.lanes, self.window)

    def consumed(self, steps: int, samples: int = 0) -> int:
        """The state `samples` after `steps` more optimizer steps: the last step of an epoch may be a smaller one."""
        epoch, place = divmod(samples, self.epoch_samples)
        left = -(-(self.epoch_samples - place) // self.global_size)
        if steps < left:
            return samples + steps * self.global_size
        epochs, more = divmod(steps - left, -(-self.epoch_samples // self.global_size))
        return (epoch + 1 + epochs) * self.epoch_samples + more * self.global_size


@dataclass(frozen=True)
class Sums:
    """Hashes of some samples of a run. Those of disjoint samples add up to that of all."""

    samples: int = 0
    lanes: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Two of `order`, two of `set`, each below 2^64."""

    def __add__(self, other: Sums) -> Sums:
        a, b = self.lanes, other.lanes
        lanes = ((a[0] + b[0]) & _MASK, (a[1] + b[1]) & _MASK, (a[2] + b[2]) & _MASK, (a[3] + b[3]) & _MASK)
        return Sums(self.samples + other.samples, lanes)

    @property
    def order(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.lanes[0]:016x}{self.lanes[1]:016x}"

    @property
    def set(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.lanes[2]:016x}{self.lanes[3]:016x}"

    @classmethod
    def read(cls, kept: dict[str, Any]) -> Sums:
        """From a ledger's JSON. Errors: KeyError, TypeError, ValueError when it is none."""
        order, own = int(kept["order"], 16), int(kept["set"], 16)
        return cls(int(kept["samples"]), (order >> 64 & _MASK, order & _MASK, own >> 64 & _MASK, own & _MASK))


class Ledger:
    """What this rank was given since the ledger began; on rank 0 also what all ranks had consumed before a resume."""

    def __init__(self, data: Data, since: dict[str, int], base: Sums) -> None:
        self._data, self._since, self._sums = data, since, base
        self._waiting: list[Share] = []
        self._ids = 0

    @classmethod
    def start(cls, slots: Slots, step: int = 0, samples: int = 0) -> Ledger:
        """A ledger that begins after `step` steps and `samples` samples of all ranks: 0 and 0 in a new run."""
        return cls(Data.of(slots), {"step": step, "samples": samples}, Sums())

    @classmethod
    def resume(cls, kept: dict[str, Any], slots: Slots, step: int, samples: int) -> Ledger:
        """Go on from what a checkpoint of `step` steps and `samples` samples holds.

        Where it holds nothing, or was kept for another order of samples, a new ledger begins here, and says so in its
        `since`.
        """
        if kept.get("format") != FORMAT or kept.get("data") != asdict(Data.of(slots)):
            return cls.start(slots, step, samples)
        return cls(Data.of(slots), dict(kept["since"]), Sums.read(kept) if slots.rank == 0 else Sums())

    def add(self, share: Share) -> None:
        """Enter a share whose optimizer step is done. Hashing waits until some thousand ids are together."""
        if share.idle:
            return
        self._waiting.append(share)
        self._ids += len(share.micro_batches) * len(share.micro_batches[0])
        if self._ids >= _BATCH:
            self._hash()

    def part(self) -> dict[str, Any]:
        """This rank's part as JSON; `total` makes the run's ledger of the parts of all ranks."""
        self._hash()
        return _plain(self._data, self._since, self._sums)

    @staticmethod
    def total(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """The run's ledger as JSON, from the parts of all ranks: `data`, `since`, `samples`, `order` and `set`."""
        first, *others = parts
        sums = Sums.read(first)
        for part in others:
            assert (part["data"], part["since"]) == (first["data"], first["since"]), "ranks of one run disagree"
            sums += Sums.read(part)
        return {**first, "samples": sums.samples, "order": sums.order, "set": sums.set}

    def _hash(self) -> None:
        shares, self._waiting, self._ids = self._waiting, [], 0
        if not shares:
            return
        ids = np.concatenate([part for share in shares for part in share.micro_batches])
        lengths = np.array([sum(map(len, share.micro_batches)) for share in shares])
        firsts = np.array([share.position for share in shares], dtype=np.int64)
        skipped = firsts - (np.cumsum(lengths) - lengths)
        positions = np.arange(len(ids), dtype=np.int64) + np.repeat(skipped, lengths)
        self._sums += _sums(positions, positions // self._data.epoch_samples, ids)


def derive(data: Data, start: int, stop: int) -> Sums:
    """The hashes that samples start..stop-1 of a run must have, from (seed, epoch, position) alone.

    About 10^7 samples a second; memory does not grow. For whole epochs that use every sample `set` is taken
    over 0..n-1 instead of the order: it then proves that the order is a permutation, too.
    """
    order, total = data.order(), Sums()
    while start < stop:
        epoch, first = divmod(start, data.epoch_samples)
        last = min(first + stop - start, data.epoch_samples)
        whole = last - first == data.samples
        for low in range(first, last, _BLOCK):
            places = np.arange(low, min(low + _BLOCK, last), dtype=np.int64)
            epochs = np.array([epoch])
            ids = order.at(epoch, places)
            total += _sums(places + epoch * data.epoch_samples, epochs, ids, places if whole else ids)
        start += last - first
    return total


def _sums(
    positions: npt.NDArray[np.int64],
    epochs: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int64],
    members: npt.NDArray[np.int64] | None = None,
) -> Sums:
    """Hashes of ids (int64, shape (n,)) at these positions; `epochs` has shape (n,) or (1,)."""
    words = np.empty((4, len(ids)), dtype=np.uint64)
    words[:2] = positions.view(np.uint64) * _FACTORS[1, :2]
    words[2:] = epochs.view(np.uint64) * _FACTORS[1, 2:]
    words[:2] += ids.view(np.uint64) * _FACTORS[0, :2]
    words[2:] += (ids if members is None else members).view(np.uint64) * _FACTORS[0, 2:]
    lanes = _mix(words).sum(axis=1, dtype=np.uint64).tolist()
    return Sums(len(ids), (lanes[0], lanes[1], lanes[2], lanes[3]))


def _mix(words: _Words) -> _Words:
    """The 64-bit finalizer of MurmurHash3 (Appleby, public domain), in place: every bit reaches every other."""
    words ^= words >> np.uint64(33)
    words *= np.uint64(0xFF51AFD7ED558CCD)
    words ^= words >> np.uint64(33)
    words *= np.uint64(0xC4CEB9FE1A85EC53)
    words ^= words >> np.uint64(33)
    return words


def _plain(data: Data, since: dict[str, int], sums: Sums) -> dict[str, Any]:
    hashes = {"samples": sums.samples, "order": sums.order, "set": sums.set}
    return {"format": FORMAT, "data": asdict(data), "since": since, **hashes}
