"""Index arrays in, batches out: in the rank itself, or in worker processes that hold no state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, tee
from typing import Any, NamedTuple, Protocol

import torch

from .config import DataConfig
from .keyed import keyed_reader
from .order import Share, Slots
from .pool import Pool


class Dataset(Protocol):
    """Anything with a length and one of these, the first that it has:

    fetch(indices, keys) -> batch    the fast way: int64 indices of shape (micro_batch,), and a uint64 key of each
                                     sample for what is drawn at random
    fetch(indices) -> batch          the same without anything random
    __getitem__(int) -> sample       one at a time, put together by torch's default_collate; may draw from torch's,
                                     Python's and numpy's default generators, which are seeded for each sample
    """

    def __len__(self) -> int: ...


class Step(NamedTuple):
    """The data of one optimizer step on one rank."""

    batches: list[Any]
    idle: bool
    """The batch carries no sample of this rank's own: its weight is 0."""
    global_size: int
    """Samples of the whole step, all ranks together."""
    samples: int
    """Samples consumed by all ranks when the step is done."""
    share: Share
    """What the batches were made of."""


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

    pool: Pool | None = field(init=False, repr=False, compare=False)
    """The worker processes, which live as long as the loader. Make it before you start threads: see `workers`."""

    def __post_init__(self) -> None:
        count, pinned = self.config.workers, self.device.type == "cuda"
        pool = Pool(self.dataset, count, self.config.prefetch, pinned) if count else None
        object.__setattr__(self, "pool", pool)

    def steps(self, slots: Slots, samples: int, count: int) -> Iterator[Step]:
        """`count` steps from the state `samples` on. With workers, one such iterator at a time.

        Errors: those of `keyed_reader` and `Pool.batches`; without workers, what the dataset raises.
        """
        size, seed = slots.epoch_samples, slots.order.seed
        if self.pool is None:
            read, stays = keyed_reader(self.dataset, seed), self._stays
            for share in islice(slots.shares(samples), count):
                epoch = (share.samples - 1) // size
                own = [read(epoch, indices) for indices in share.micro_batches]
                if not stays:
                    own = [self._placed(batch) for batch in own]
                yield Step(own, share.idle, share.global_size, share.samples, share)
            return
        shares, ahead = tee(islice(slots.shares(samples), count))
        asked = (((share.samples - 1) // size, indices) for share in ahead for indices in share.micro_batches)
        made = self.pool.batches(seed, asked)
        for share in shares:
            own = [self._placed(next(made)) for _ in share.micro_batches]
            yield Step(own, share.idle, share.global_size, share.samples, share)

    @property
    def _stays(self) -> bool:
        """Whether batches are used as the dataset made them."""
        return self.device.type == "cpu" and self.dtype is None

    def _placed(self, batch: Any) -> Any:
        return batch if self._stays else place(batch, self.device, self.dtype)
