"""One optimizer step, exact for uneven batches, whose only collective is DDP's own all-reduce of the gradients.

The loss of a task is a sum with a weight. The gradient of a step is that of

    (sum of the losses over all ranks and micro-batches) / (sum of their weights)

whatever each rank's part was. The global weight has to be known for that, so it travels with the gradients, as one of
the `words`; the others tell every rank, at the same step, whether any was asked to stop, and the whole batch's loss.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .config import TrainConfig
from .device import autocast
from .errors import NotFinite, TrainingError
from .loader import Step
from .optim import set_lr
from .ranks import Ranks
from .task import Task
from .words import WEIGHT, Late, Own, Reading, Whole, total


class Stepper:
    """Takes optimizer steps of a task's model on this rank.

    On the CPU a step's reading is there when it returns. On a CUDA device it is copied out without waiting, and comes
    with the next step, on all ranks alike; `flush` waits for it.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._unused_allowed = bool(getattr(task, "find_unused_parameters", False))
        self._whole = Whole(task, model, device, self._unused_allowed)
        self._optimizer, self._ranks, self._device = optimizer, ranks, device
        self._clip_norm = config.optim.clip_norm
        self._autocast = autocast(config.precision, device)
        self._expected = float(getattr(task, "weight_per_sample", 1.0))
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._forward: nn.Module = self._whole
        self._no_sync: Any = nullcontext
        if ranks.world_size > 1:
            ddp = DistributedDataParallel(
                self._whole, gradient_as_bucket_view=True, find_unused_parameters=self._unused_allowed
            )
            self._forward, self._no_sync = ddp, ddp.no_sync
        self._words = self._whole.words
        self._own = Own(self._words)
        self._epsilon = torch.finfo(self._words.dtype).eps
        self._root: tuple[float, Tensor] | None = None
        self._late = Late(self._words) if device.type == "cuda" else None
        self._checked = False

    def step(self, number: int, data: Step, lr: float, stop: bool, now: bool = False) -> list[Reading]:
        """Forward, backward, optimizer. Returns the readings that became available; `now` waits for this step's.

        Errors: NotFinite on every rank alike when the loss is not a number (on the CPU before the optimizer's step);
        TrainingError for a loss that is no scalar, a weight of 0, or parameters that got no gradient.
        """
        self._backward(number, data, stop)
        expected = data.global_size * self._expected
        words = self._words.grad
        assert words is not None
        readings: list[Reading] = []
        if self._late is None:
            weight, asked, loss = words.tolist()
            readings.append(self._reading(number, data.samples, lr, weight, asked, loss))
            self._scale_on_cpu(expected / total(weight, self._ranks.world_size, self._epsilon))
        else:
            readings += [self._reading(*late) for late in self._late.swap(number, data.samples, lr, words)]
            self._scale_on_device(expected / (words[WEIGHT] * self._ranks.world_size))
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._words.grad = None
        for parameter in self._trained:
            parameter.grad = None
        return readings + self.flush() if now else readings

    def flush(self) -> list[Reading]:
        """Wait for the reading that is still under way, if there is one."""
        if self._late is None:
            return []
        return [self._reading(*late) for late in self._late.drain()]

    def _backward(self, number: int, data: Step, stop: bool) -> None:
        """Gradients of this rank's share into the parameters, averaged over the ranks; the words with them."""
        root = self._root_gradient(self._ranks.world_size / (data.global_size * self._expected))
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
        # The words are a leaf: as a root of their own, their gradient is set without a node in the graph.
        torch.autograd.backward((loss, words), (root, own))
        if not self._checked:
            self._check_gradients()

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor | float, Tensor]:
        """The loss's sum and weight of a micro-batch, and the words."""
        with self._autocast:
            found = self._forward(batch)
        if found[0].dim():
            raise TrainingError(f"the task's loss has shape {tuple(found[0].shape)}; return the sum, a scalar")
        return found  # type: ignore[no-any-return]

    def _root_gradient(self, scale: float) -> Tensor:
        """The gradient that backward starts from. With the expected weight in it, no later pass over gradients is due.

        DDP averages sums over the ranks: (1/R) sum(g_r) x R/weight = sum(g_r)/weight.
        """
        if self._root is None or self._root[0] != scale:
            dtype = self._words.dtype
            self._root = scale, torch.tensor(scale, dtype=dtype, device=self._device)
        return self._root[1]

    def _scale_on_cpu(self, factor: float) -> None:
        if self._clip_norm is None and factor == 1.0:
            return
        gradients = [p.grad for p in self._trained if p.grad is not None]
        if self._clip_norm is not None:
            norm = float(nn.utils.get_total_norm(gradients)) * factor
            factor *= min(1.0, self._clip_norm / (norm + 1e-6))
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def _scale_on_device(self, factor: Tensor) -> None:
        gradients = [p.grad for p in self._trained if p.grad is not None]
        if self._clip_norm is not None:
            norm = nn.utils.get_total_norm(gradients) * factor
            factor = factor * (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor)

    def _reading(self, number: int, samples: int, lr: float, weight: float, asked: float, loss: float) -> Reading:
        """From the means over the ranks of the three words."""
        if not math.isfinite(loss):
            raise self._not_finite(number)
        if not 0.0 < weight < math.inf:
            raise TrainingError(
                f"step {number}: the loss's weight is {weight} over all ranks, so their mean is undefined; "
                "the task's loss must return the number of samples or tokens that it counted"
            )
        return Reading(number, samples, loss / weight, lr, asked > 0.0)

    def _not_finite(self, number: int) -> NotFinite:
        """Find the first rank whose own loss was not finite. A collective: every rank read the same words."""
        own = self._own.loss(number).double().reshape(1)
        losses = [own]
        if self._ranks.world_size > 1:
            losses = [torch.empty_like(own) for _ in range(self._ranks.world_size)]
            dist.all_gather(losses, own)
        values = [value.item() for value in losses]
        bad = [rank for rank, value in enumerate(values) if not math.isfinite(value)]
        rank = bad[0] if bad else self._ranks.rank  # each was finite, their sum was not
        return NotFinite(number, rank, values[rank])

    def _check_gradients(self) -> None:
        """Once, in the first step: with a parameter left out, DDP would leave gradients of others unreduced."""
        self._checked = True
        named = self._whole.model.named_parameters()
        missing = [name for name, p in named if p.requires_grad and p.grad is None]
        if missing and not self._unused_allowed:
            raise TrainingError(
                f"the first step gave no gradient to {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}; "
                "freeze them with requires_grad_(False), or set find_unused_parameters = True on the task's class"
            )
