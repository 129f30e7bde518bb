"""Sums of gradients in flat memory, and how ranks exchange them so that each element is added in the tree's order.

Only bytes travel: no library that moves them adds anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import all_gather, swap
from .ranks import Ranks
from .tree import Plan, add_up

_LITTLE = 1 << 18
"""Up to so many bytes, one collective takes less time than two that move fewer."""


class Flat:
    """A piece of memory for each type, and views of it in the form of some tensors: `views`."""

    def __init__(self, like: Sequence[Tensor], multiple: int) -> None:
        """`multiple`: the elements of a piece are a multiple of it; those that no view has are 0."""
        sizes: dict[torch.dtype, int] = {}
        starts = []
        for tensor in like:
            starts.append(sizes.get(tensor.dtype, 0))
            sizes[tensor.dtype] = starts[-1] + tensor.numel()
        found = {
            dtype: torch.zeros(-(-size // multiple) * multiple, dtype=dtype, device=like[0].device)
            for dtype, size in sizes.items()
        }
        self.pieces = list(found.values())
        self.views = [
            found[tensor.dtype].as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride(), start)
            for tensor, start in zip(like, starts, strict=True)
        ]


class Sums:
    """A step's sum over the leaves of all ranks. Memory is used again: about as many pieces as the tree is high."""

    def __init__(self, like: Sequence[Tensor], ranks: Ranks) -> None:
        """`like`: tensors in the form of those that are summed."""
        self._like, self._ranks = like, ranks
        self._free: list[Flat] = []
        self._left: list[Flat] = []
        self._rooms: dict[torch.dtype, Tensor] = {}

    def begin(self) -> None:
        """A new step. What `total` returned may be overwritten from now on."""
        self._free += self._left
        self._left = []

    def add(self, leaf: list[Tensor], due: int) -> None:
        """Take this rank's next leaf, and do the additions that are due after it."""
        if not due:
            self._left.append(self._take())
            torch._foreach_copy_(self._left[-1].views, leaf)
            return
        torch._foreach_add_(self._left[-1].views, leaf)
        for _ in range(due - 1):
            right = self._left.pop()
            for into, piece in zip(self._left[-1].pieces, right.pieces, strict=True):
                into.add_(piece)
            self._free.append(right)

    def total(self, plan: Plan) -> Flat:
        """The sum of all leaves, with the same bits on every rank. A collective."""
        if self._ranks.world_size > 1:
            result = self._left[0] if self._left else self._take()
            for number, piece in enumerate(result.pieces):
                if plan.held == [1, 1]:
                    self._swap(piece)
                elif set(plan.held) == {1} and self._ranks.world_size * piece.nbytes <= _LITTLE:
                    self._gather(piece, plan)
                else:
                    self._exchange([flat.pieces[number] for flat in self._left], piece, plan)
            self._free += self._left[1:]
            self._left = [result]
        (flat,) = self._left
        return flat

    def _take(self) -> Flat:
        return self._free.pop() if self._free else Flat(self._like, self._ranks.world_size)

    def _swap(self, own: Tensor) -> None:
        """Two ranks with one sum each give it to each other: as many bytes as by `_exchange`, in one collective."""
        received = self._room(own, own.numel())
        swap(own, received, self._ranks)
        own.add_(received)

    def _gather(self, own: Tensor, plan: Plan) -> None:
        """Each rank gets all sums, one from each rank, and adds all of them, into its own: one collective."""
        received = self._room(own, self._ranks.world_size * own.numel())
        all_gather(own, received)
        rows = list(received.view(self._ranks.world_size, -1).unbind())
        rows[self._ranks.rank] = own
        add_up(rows, plan.rest, lambda left, right: right.add_(left) if right is own else left.add_(right))

    def _exchange(self, own: Sequence[Tensor], result: Tensor, plan: Plan) -> None:
        """Each rank gets its share of the elements of all sums, adds them, and gives the result to all.

        With one sum from each rank that moves as many bytes as a ring all-reduce does.
        """
        world_size = self._ranks.world_size
        size = result.numel() // world_size
        shares = [piece[r * size : (r + 1) * size] for r in range(world_size) for piece in own]
        sent = own[0] if len(own) == 1 else torch.cat(shares or [result[:0]])
        received = self._room(result, sum(plan.held) * size)
        share = size * result.element_size()
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [count * share for count in plan.held],
            [len(own) * share] * world_size,
        )
        (total,) = add_up(received.view(-1, size).unbind(), plan.rest, Tensor.add_)
        all_gather(total, result)

    def _room(self, like: Tensor, size: int) -> Tensor:
        room = self._rooms.get(like.dtype)
        if room is None or len(room) < size:
            room = self._rooms[like.dtype] = like.new_zeros(size)
        return room[:size]
