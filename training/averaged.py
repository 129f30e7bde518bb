"""A step's gradient by DDP: its exchange of gradients is the only collective."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .exchange import Exchange
from .firststep import FirstStep
from .loader import Step
from .ranks import Ranks
from .words import Own, Whole


class Averaged:
    """Leaves the mean over the ranks of their gradients, each summed over its micro-batches, in `.grad`."""

    def __init__(
        self,
        whole: Whole,
        ranks: Ranks,
        autocast: AbstractContextManager[object],
        unused_allowed: bool,
        order: Sequence[str] = (),
    ) -> None:
        self.divisor = ranks.world_size
        """What the sum over the ranks was divided by."""
        self.order = list(order)
        """Names of the parameters as their gradients come, known after the first step.

        After its first step, DDP lays its buckets out in this order, and from three ranks on the place of a gradient in
        its bucket decides in which order the ranks' values are added. So a resumed run has to begin with it.
        """
        self._unused_allowed, self._autocast = unused_allowed, autocast
        self._forward: nn.Module = whole
        self._no_sync: Any = nullcontext
        if ranks.world_size > 1:
            ddp = DistributedDataParallel(whole, gradient_as_bucket_view=True, find_unused_parameters=unused_allowed)
            self._forward, self._no_sync = ddp, ddp.no_sync
            if Exchange.pays(list(whole.trained.values()), ranks):
                exchange = Exchange(ranks)
                ddp.register_comm_hook(None, lambda _, bucket: exchange.average(bucket))
        self._own = Own(whole.words)
        self._first: FirstStep | None = FirstStep(whole.trained)

    def run(self, number: int, data: Step, root: Tensor, stop: bool) -> None:
        """Gradients of step `number` into the parameters and the words; each backward pass begins with `root`.

        Errors: TrainingError for parameters without a gradient.
        """
        loss_sum: Tensor | float = 0.0
        weight_sum: Tensor | float = 0.0
        for batch in data.batches[:-1]:
            with self._no_sync():
                loss, weight, _ = self._loss(batch)
                torch.autograd.backward((loss,), (root,))
            loss_sum, weight_sum = loss_sum + loss.detach(), weight_sum + weight
        loss, weight, words = self._loss(data.batches[-1])
        if data.idle:
            loss, weight = loss * 0.0, 0.0
        alone = len(data.batches) == 1
        loss_sum = loss.detach() if alone else loss_sum + loss.detach()
        own = self._own.write(number, weight if alone else weight_sum + weight, stop, loss_sum)
        if self._first is not None:
            self._first.watch()
        # The words are a leaf: as a root of their own, their gradient is set without a node in the graph.
        torch.autograd.backward((loss, words), (root, own))
        if self._first is not None:
            self._first.check(all_needed=not self._unused_allowed)
            self.order, self._first = self._first.order, None

    def own_loss(self, number: int) -> Tensor:
        """This rank's loss sum of step `number`, which is the last or the one before."""
        return self._own.loss(number)

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | float, Tensor]:
        with self._autocast:
            return self._forward(batch)  # type: ignore[no-any-return]
