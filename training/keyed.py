"""Makes batches of a dataset so that what a sample draws at random depends on (seed, epoch, sample id) alone."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import default_collate

from .errors import DataError
from .generators import Generator, default_generators
from .permute import Indices

Keys = npt.NDArray[np.uint64]
Read = Callable[[int, Indices], Any]
"""(epoch, int64 indices of shape (micro_batch,)) -> batch."""


def sample_keys(seed: int, epoch: int, indices: Indices) -> Keys:
    """A key for each sample of an epoch, uint64 of indices' shape: the finalizer of SplitMix64 (Steele et al. 2014)."""
    words = indices.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + _base(seed, epoch)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@lru_cache(maxsize=8)
def _base(seed: int, epoch: int) -> np.uint64:
    digest = hashlib.shake_256(f"sample/{seed}/{epoch}".encode()).digest(8)
    return np.uint64(int.from_bytes(digest, "little"))


def keyed_reader(dataset: Any, seed: int) -> Read:
    """The function that makes batches of a dataset, and leaves the default generators as they were.

    `__getitem__` may draw from them: they are seeded by each sample's key. `fetch` may not, since what it drew would
    depend on who else is in the batch, thus on the world size: it takes the keys of its samples instead, as
    `fetch(indices, keys)`, see `sample_keys`.

    Errors: TypeError when the dataset has neither. The function's: DataError when `fetch` was seen to draw.
    """
    if callable(fetch := getattr(dataset, "fetch", None)):
        if "keys" in inspect.signature(fetch).parameters:
            return _Fetched(lambda epoch, indices: fetch(indices, sample_keys(seed, epoch, indices)), dataset)
        return _Fetched(lambda _, indices: fetch(indices), dataset)
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{type(dataset).__name__} has neither fetch(indices) nor __getitem__(index)")
    return _Collated(dataset, seed)


class _Fetched:
    """Watches the first batches and then some: a look at the generators costs as much as a small batch."""

    _ALL, _THEN_EVERY = 64, 64

    def __init__(self, fetch: Read, dataset: Any) -> None:
        self._fetch, self._name = fetch, type(dataset).__name__
        self._generators = default_generators()
        self._calls = 0

    def __call__(self, epoch: int, indices: Indices) -> Any:
        self._calls += 1
        if self._calls > self._ALL and self._calls % self._THEN_EVERY:
            return self._fetch(epoch, indices)
        with _aside(self._generators):
            batch = self._fetch(epoch, indices)
            moved = [generator.name for generator in self._generators if generator.moved()]
        if moved:
            raise DataError(
                f"{self._name}.fetch drew random numbers from {' and '.join(moved)}: they would depend on how many "
                "ranks share a batch. Take a key of each sample, fetch(self, indices, keys), and draw from those, "
                "for example with numpy.random.Philox(key=int(key)); or draw in __getitem__(index)"
            )
        return batch


class _Collated:
    """Seeds, for each sample, the generators that the dataset was ever seen to draw from: seeding all costs 10 us.

    A batch that drew from another one is made again.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._generators = default_generators()
        self._drawn: list[Generator] = []

    def __call__(self, epoch: int, indices: Indices) -> Any:
        while True:
            with _aside(self._generators):
                batch = default_collate(self._samples(epoch, indices))
                moved = [g for g in self._generators if g not in self._drawn and g.moved()]
            if not moved:
                return batch
            self._drawn += moved

    def _samples(self, epoch: int, indices: Indices) -> list[Any]:
        samples = []
        keys = sample_keys(self._seed, epoch, indices).tolist() if self._drawn else None
        for place, index in enumerate(indices.tolist()):
            if keys is not None:
                for generator in self._drawn:
                    generator.seed(keys[place])
            try:
                samples.append(self._dataset[index])
            except Exception as error:
                error.add_note(f"while sample {index} was made")
                raise
        return samples


@contextmanager
def _aside(generators: list[Generator]) -> Iterator[None]:
    for generator in generators:
        generator.put_aside()
    try:
        yield
    finally:
        for generator in generators:
            generator.put_back()
