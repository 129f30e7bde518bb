"""Index arrays in, batches out: in the rank itself, or in worker processes that hold no state."""

from __future__ import annotations

import hashlib
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from .config import DataConfig
from .order import Indices, Share, Slots

Asked = tuple[tuple[int, ...], Indices]
"""A batch's place in the run (any tuple that no other batch has), and the samples that it is made of."""


class Dataset(Protocol):
    """Anything with a length and either `fetch(indices) -> batch` or `__getitem__(int) -> sample`.

    `fetch` gets int64 indices of shape (micro_batch,) and returns the whole batch: the fast way. Samples from
    `__getitem__` are collated with torch's default_collate.
    """

    def __len__(self) -> int: ...


@runtime_checkable
class Fetches(Protocol):
    """A dataset that makes a batch from an array of indices."""

    def fetch(self, indices: Indices) -> Any: ...


class Step(NamedTuple):
    """The data of one optimizer step on one rank."""

    batches: list[Any]
    idle: bool
    """The batch carries no sample of this rank's own: its weight is 0."""
    global_size: int
    """Samples of the whole step, all ranks together."""
    samples: int
    """Samples consumed by all ranks when the step is done."""


def reader(dataset: Any) -> Any:
    """The function from int64 indices to a batch.

    Errors: TypeError when the dataset has neither `fetch` nor `__getitem__`.
    """
    if isinstance(dataset, Fetches):
        return dataset.fetch
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{type(dataset).__name__} has neither fetch(indices) nor __getitem__(index)")
    return lambda indices: default_collate([dataset[index] for index in indices.tolist()])


def place(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Move a batch's tensors to the device, floating ones also to `dtype` when it is given."""
    if isinstance(value, torch.Tensor):
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.to(device=device, dtype=wanted, non_blocking=True)
    if isinstance(value, dict):
        return {key: place(item, device, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(place(item, device, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(place(item, device, dtype) for item in value)
    return value


@dataclass(frozen=True)
class Loader:
    """Batches of a dataset on this rank's device."""

    dataset: Any
    config: DataConfig
    device: torch.device
    dtype: torch.dtype | None = None
    """Type of floating tensors; None leaves them as the dataset made them."""

    def steps(self, slots: Slots, samples: int, count: int) -> Iterator[Step]:
        """`count` steps from the state `samples` on. Workers, if any, end with the iterator."""
        if not self.config.workers:
            read = self._read
            for share in islice(slots.shares(samples), count):
                own = [read(indices) for indices in share.micro_batches]
                yield Step(own, share.idle, share.global_size, share.samples)
            return
        shares, ahead = tee(islice(slots.shares(samples), count))
        batches = self.batches(_asked(slots, ahead))
        for share in shares:
            own = [next(batches) for _ in share.micro_batches]
            yield Step(own, share.idle, share.global_size, share.samples)

    def batches(self, asked: Iterable[Asked]) -> Iterator[Any]:
        """One batch for each array of indices, in their order."""
        if not self.config.workers:
            read = self._read
            return (read(indices) for _, indices in asked)
        workers: DataLoader[Any] = DataLoader(
            _Seeded(self.dataset),  # type: ignore[arg-type]
            batch_size=None,
            sampler=asked,
            num_workers=self.config.workers,
            prefetch_factor=self.config.prefetch,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # else DataLoader draws from the rank's own generator
        )
        return (self._placed(batch) for batch in workers)

    @property
    def _read(self) -> Callable[[Indices], Any]:
        """From int64 indices to a batch on the device."""
        read: Callable[[Indices], Any] = reader(self.dataset)
        if self._stays:
            return read
        return lambda indices: self._placed(read(indices))

    @property
    def _stays(self) -> bool:
        """A batch is where and what it has to be as the dataset made it."""
        return self.device.type == "cpu" and self.dtype is None

    def _placed(self, batch: Any) -> Any:
        return batch if self._stays else place(batch, self.device, self.dtype)


def _asked(slots: Slots, shares: Iterator[Share]) -> Iterator[Asked]:
    for share in shares:
        for number, indices in enumerate(share.micro_batches):
            yield (slots.order.seed, share.samples, slots.rank, number), indices


class _Seeded:
    """A dataset indexed by (key, indices), for DataLoader's workers.

    Random numbers drawn while a batch is made depend on its place in the run, not on the worker that makes it.
    """

    def __init__(self, dataset: Any) -> None:
        self._read = reader(dataset)

    def __getitem__(self, asked: Asked) -> Any:
        key, indices = asked
        seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return self._read(indices)


def _ignore_signals(worker: int) -> None:
    """A stop is the rank's business: its workers go on until it has ended its step."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
