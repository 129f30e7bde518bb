"""How ranks on CPUs exchange what they add up: in one round of messages, where gloo's all-reduce takes several.

A round wakes threads on every rank, and that takes longer than the bytes of a small model. Two ranks give each other
all they have, which is no more than an all-reduce moves. More ranks do so only with little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .ranks import Ranks

LITTLE = 1 << 20
"""Up to so many bytes of all ranks together, one round takes less time than those of a ring, which move fewer."""


def swap(own: Tensor, received: Tensor, ranks: Ranks, behind: bool = False) -> dist.Work | None:
    """Two ranks give each other a piece of memory of the same size. `behind`: returns what can be waited for."""
    sizes = [0 if rank == ranks.rank else own.nbytes for rank in range(2)]
    into, out = received.view(torch.uint8), own.view(torch.uint8)
    work: dist.Work | None = dist.all_to_all_single(into, out, sizes, sizes, async_op=behind)
    return work


def all_gather(own: Tensor, received: Tensor, behind: bool = False) -> dist.Work | None:
    """Every rank gets the pieces of all, in the ranks' order. `behind`: returns what can be waited for."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
    work: dist.Work | None = gather(received.view(-1).view(torch.uint8), own.view(torch.uint8), async_op=behind)
    return work


class Exchange:
    """Means over the ranks of DDP's buckets, as its communication hook.

    Each rank adds the same numbers in the ranks' order, so all get the same bits: with two ranks those of DDP's own
    all-reduce, with more the same up to rounding.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._rooms: dict[int, Tensor] = {}

    @staticmethod
    def pays(parameters: Sequence[Tensor], ranks: Ranks) -> bool:
        """Whether it takes less time than DDP's own all-reduce of these parameters' gradients."""
        if any(parameter.device.type != "cpu" for parameter in parameters):
            return False
        return ranks.world_size == 2 or ranks.world_size * sum(p.nbytes for p in parameters) <= LITTLE

    def average(self, bucket: Any) -> Future[Tensor]:
        """Begin to take a dist.GradBucket's mean over the ranks, in its own memory. Errors of the result: gloo's."""
        own: Tensor = bucket.buffer()
        own.mul_(1.0 / self._ranks.world_size)
        pair = self._ranks.world_size == 2
        received = self._room(bucket.index(), own, 1 if pair else self._ranks.world_size)
        work = swap(own, received[0], self._ranks, behind=True) if pair else all_gather(own, received, behind=True)
        assert work is not None

        def add(done: Future[list[Tensor]]) -> Tensor:
            done.value()  # raises what went wrong
            if not pair:
                own.copy_(received[0])
            for other in received[0 if pair else 1 :]:
                own.add_(other)
            return own

        mean: Future[Tensor] = work.get_future().then(add)
        return mean

    def _room(self, number: int, own: Tensor, rows: int) -> Tensor:
        """Memory to receive into, shape (rows, len(own)). DDP lays its buckets out anew after the first step."""
        room = self._rooms.get(number)
        if room is None or room.shape != (rows, len(own)) or room.dtype != own.dtype:
            room = self._rooms[number] = own.new_empty((rows, len(own)))
        return room
