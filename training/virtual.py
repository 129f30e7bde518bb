"""A step's gradient as a function of its micro-batches alone, to the last bit, however many ranks share them out.

The micro-batches are virtual ranks. Each one's gradient is computed apart, with random numbers keyed by (seed, step,
its number) and with the buffers that the step began with, and all are added in the order of the tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import TrainConfig
from .deterministic import explained, refuse
from .errors import TrainingError
from .firststep import left_out
from .generators import seed_all
from .loader import Step
from .ranks import Ranks
from .schedule import batch_plan
from .sums import Flat, Sums
from .tree import plan
from .words import STOP, Own, Whole


class Virtual:
    """Leaves the sum over all micro-batches of all ranks, the same bits on each, in `.grad`."""

    divisor = 1
    """What the sum was divided by."""

    def __init__(
        self,
        whole: Whole,
        config: TrainConfig,
        ranks: Ranks,
        autocast: AbstractContextManager[object],
        unused_allowed: bool,
    ) -> None:
        """A collective: all ranks begin with rank 0's parameters and buffers.

        Errors: ConfigError as `refuse`; TrainingError when the ranks' models are of different forms.
        """
        refuse(whole.model)
        _begin_alike(whole.model, ranks)
        self.order: list[str] = []
        """No order of gradients has to be kept for a resumed run."""
        self._whole, self._ranks, self._autocast, self._unused_allowed = whole, ranks, autocast, unused_allowed
        self._seed = config.seed
        self._plan = batch_plan(config.batch, ranks.world_size)
        words = whole.words
        self._parameters = [p for p in whole.trained.values() if p is not words]
        self._names = [name for name, p in whole.trained.items() if p is not words]
        used = [words.new_zeros(len(self._names))] if unused_allowed else []
        self._sums = Sums([*self._parameters, words, *used], ranks)
        self._own = Own(words)
        self._losses = [words.new_zeros(()) for _ in range(2)]
        self._buffers = _Buffers(whole.model, ranks)

    def run(self, number: int, data: Step, root: Tensor, stop: bool) -> None:
        """Gradients of step `number` into the parameters and the words; each backward pass begins with `root`.

        Errors: TrainingError for parameters without a gradient, and as `explained`.
        """
        count = -(-data.global_size // self._plan.per_rank)
        todo = plan(count, self._plan.accumulate, self._ranks.world_size, self._ranks.rank)
        assert data.idle or len(data.batches) == len(todo.leaves)
        self._sums.begin()
        self._losses[number % 2].zero_()
        with explained():
            for leaf, due, batch in zip(todo.leaves, todo.adding, data.batches, strict=False):  # an idle rank has none
                self._buffers.before(several=len(todo.leaves) > 1)
                seed_all(key(self._seed, number, leaf))
                self._sums.add(self._gradients(number, batch, root, stop), due)
                self._buffers.after(leaf)
        total = self._sums.total(todo)
        self._buffers.end()
        if 0 in todo.held:  # a rank without a leaf has no words in the sum, but its wish to stop counts
            words = total.views[len(self._names)]
            wish = torch.full_like(words[STOP], float(stop))
            dist.all_reduce(wish)
            words[STOP] = wish
        self._hand_over(total)

    def own_loss(self, number: int) -> Tensor:
        """This rank's loss sum of step `number`, which is the last or the one before."""
        return self._losses[number % 2]

    def _gradients(self, number: int, batch: Any, root: Tensor, stop: bool) -> list[Tensor]:
        """Of one micro-batch: each parameter's, the words, and which parameters had none where that is allowed."""
        with self._autocast:
            loss, weight, _ = self._whole(batch)
        torch.autograd.backward((loss,), (root,))
        self._losses[number % 2].add_(loss.detach())
        words = self._own.write(number, weight, stop, loss.detach())
        found = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if self._unused_allowed:
            used = words.new_tensor([gradient is not None for gradient in found])
            given = zip(found, self._parameters, strict=True)
            return [*(torch.zeros_like(p) if gradient is None else gradient for gradient, p in given), words, used]
        gradients = [gradient for gradient in found if gradient is not None]
        if len(gradients) < len(found):
            names = [name for name, gradient in zip(self._names, found, strict=True) if gradient is None]
            raise left_out(f"step {number}", names)
        return [*gradients, words]

    def _hand_over(self, total: Flat) -> None:
        used = total.views[-1].tolist() if self._unused_allowed else [1.0] * len(self._names)
        for parameter, gradient, count in zip(self._parameters, total.views, used, strict=False):
            parameter.grad = gradient if count else None
        self._whole.words.grad = total.views[len(self._names)]


class _Buffers:
    """A model's buffers, such as running means. The first micro-batch of a step changes them, the others do not."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._any = next(model.buffers(), None) is not None
        self._begun: list[Tensor] = []
        self._left: list[Tensor] = []

    def before(self, several: bool) -> None:
        """Before a micro-batch, which begins with what the step began with. `several`: this rank has more than one."""
        if not self._any or not several:
            return
        if self._begun:
            self._put(self._begun)
        else:
            self._begun = [buffer.clone() for buffer in self._live()]

    def after(self, leaf: int) -> None:
        """After it; `leaf` is its number in the step."""
        if leaf == 0 and self._begun:
            self._left = [buffer.clone() for buffer in self._live()]

    def end(self) -> None:
        """All ranks get what the first micro-batch left, which is rank 0's. A collective where there are buffers."""
        if not self._any:
            return
        if self._left:
            self._put(self._left)
        self._begun, self._left = [], []
        if self._ranks.world_size == 1:
            return
        live = self._live()
        content = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in live])
        dist.broadcast(content, 0)
        if self._ranks.rank == 0:
            return
        sizes = [buffer.numel() * buffer.element_size() for buffer in live]
        for buffer, part in zip(live, torch.split(content, sizes), strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _live(self) -> list[Tensor]:
        """Asked for anew each time: a forward pass may put another tensor in a buffer's place."""
        return [buffer.detach() for buffer in self._model.buffers()]

    def _put(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._live(), values, strict=True):
            buffer.copy_(value)


def key(seed: int, step: int, leaf: int) -> int:
    """Seed of 63 bits for the random numbers that a model draws in a micro-batch."""
    digest = hashlib.blake2b(f"micro-batch/{seed}/{step}/{leaf}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _begin_alike(model: nn.Module, ranks: Ranks) -> None:
    if ranks.world_size == 1:
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    forms: list[list[Any]] = [[]] * ranks.world_size
    dist.all_gather_object(forms, own)
    for rank, form in enumerate(forms):
        if form != forms[0]:
            name = next((mine[0] for mine, other in zip(form, forms[0], strict=False) if mine != other), "their number")
            raise TrainingError(
                f"the models of ranks 0 and {rank} differ in form, first in {name}; model() has to make the same one "
                "on each rank"
            )
    for tensor in tensors.values():
        dist.broadcast(tensor.detach(), 0)
