"""One optimizer step, exact for uneven batches. Its only collective is DDP's own exchange of gradients.

The loss of a task is a sum with a weight. The gradient of a step is that of

    (sum of the losses over all ranks and micro-batches) / (sum of their weights)

whatever each rank's part was. The global weight has to be known for that, so it travels with the gradients, as one of
the `words`; the others tell every rank, at the same step, whether any was asked to stop, and the whole batch's loss.
With `reproducible` the same numbers are added in a fixed tree instead (`virtual`), and all after that is the same.

A step whose loss or gradient is not finite changes nothing: all ranks see the same sums, and so agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .averaged import Averaged
from .config import TrainConfig
from .device import autocast
from .errors import NotFinite, TrainingError
from .finite import Gradients, KeptBuffers, gradient_fault, loss_fault, scale_and_check
from .loader import Step
from .optim import set_lr
from .ranks import Ranks
from .task import Task
from .virtual import Virtual
from .words import BAD, WEIGHT, Late, Reading, Whole, total


class Stepper:
    """Takes optimizer steps of a task's model on this rank.

    On the CPU a step's reading is there when it returns. On a CUDA device it is copied out without waiting, and comes
    with the next step, on all ranks alike; `flush` waits for it. What is not finite is left out of the optimizer's step
    on the device itself, in time; only the news of it comes late.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        ranks: Ranks,
        device: torch.device,
        order: Sequence[str] = (),
    ) -> None:
        """`order`: the `order` that the run's steps had before it was stopped."""
        unused_allowed = bool(getattr(task, "find_unused_parameters", False))
        traced = unused_allowed and not config.reproducible
        self._whole = Whole(task, model, device, traced, order)
        self._optimizer, self._ranks, self._device = optimizer, ranks, device
        self._clip_norm = config.optim.clip_norm
        precision = autocast(config.precision, device)
        self._gradient: Averaged | Virtual
        if config.reproducible:
            self._gradient = Virtual(self._whole, config, ranks, precision, unused_allowed)
        else:
            self._gradient = Averaged(self._whole, ranks, precision, unused_allowed, order)
        self._expected = float(getattr(task, "weight_per_sample", 1.0))
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._words = self._whole.words
        self._epsilon = torch.finfo(self._words.dtype).eps
        self._root: tuple[float, Tensor] | None = None
        self._late = Late(self._words) if device.type == "cuda" else None
        self._raises = config.health.not_finite == "stop"
        self._check = Gradients(buckets=ranks.world_size > 1 or config.reproducible)
        buffers = [] if self._raises else list(model.buffers())
        self._buffers = KeptBuffers(buffers) if buffers else None
        self._stepped = False

    @property
    def order(self) -> list[str]:
        """The order of gradients that a resumed run has to begin with."""
        return self._gradient.order

    def step(self, number: int, data: Step, lr: float, stop: bool, now: bool = False) -> list[Reading]:
        """Forward, backward, optimizer. Returns the readings that became available; `now` waits for this step's.

        A loss or gradient that is not finite leaves parameters, optimizer and buffers as they were; the reading says so
        in `fault`, unless train.health.not_finite is `stop`: then it is raised, on every rank alike. With `stop` on
        the CPU, unless they are clipped, gradients are looked at only when `now` is set, because it takes 2% of a small
        model's step; before the next save it comes out all the same, by the next loss at the latest.
        Errors: NotFinite; TrainingError for a loss that is no scalar, a weight of 0, or parameters without a gradient.
        """
        if self._buffers is not None:
            self._buffers.keep()
        expected = data.global_size * self._expected
        self._gradient.run(number, data, self._root_gradient(self._gradient.divisor / expected), stop)
        set_lr(self._optimizer, lr)
        if self._late is None:
            readings = [self._update_on_cpu(number, data.samples, lr, expected, now or not self._raises)]
        else:
            readings = self._update_on_device(self._late, number, data.samples, lr, expected)
        self._words.grad = None
        for parameter in self._trained:
            parameter.grad = None
        return readings + self.flush() if now else readings

    def flush(self) -> list[Reading]:
        """Wait for the reading that is still under way, if there is one."""
        if self._late is None:
            return []
        return [self._reading(*late) for late in self._late.drain()]

    def _root_gradient(self, scale: float) -> Tensor:
        """The gradient that backward starts from. With the expected weight in it, no later pass over gradients is due.

        DDP averages sums over the ranks: (1/R) sum(g_r) x R/weight = sum(g_r)/weight. R is the scale's divisor.
        """
        if self._root is None or self._root[0] != scale:
            dtype = self._words.dtype
            self._root = scale, torch.tensor(scale, dtype=dtype, device=self._device)
        return self._root[1]

    def _update_on_cpu(self, number: int, samples: int, lr: float, expected: float, look: bool) -> Reading:
        assert self._words.grad is not None
        weight, asked, loss, _ = self._words.grad.tolist()
        reading = self._reading(number, samples, lr, weight, asked, loss, 0.0)
        if reading.fault is None:
            factor = expected / total(weight, self._gradient.divisor, self._epsilon)
            if self._scale_on_cpu(factor, look):
                self._optimizer.step()
                return reading
            reading = reading._replace(fault=self._found(gradient_fault(number, self._whole.model)))
        if self._buffers is not None:
            self._buffers.bring_back()
        return reading

    def _scale_on_cpu(self, factor: float, look: bool) -> bool:
        """Whether the gradients are finite, if it is looked at, and then multiplied by the factor and clipped."""
        if self._clip_norm is None and factor == 1.0 and not look:
            return True
        gradients = [p.grad for p in self._trained if p.grad is not None]
        if self._clip_norm is not None:
            norm = float(nn.utils.get_total_norm(gradients)) * factor
            if not math.isfinite(norm):
                return False
            factor *= min(1.0, self._clip_norm / (norm + 1e-6))
        elif look and not self._check.finite(gradients):
            return False
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        return True

    def _update_on_device(self, late: Late, number: int, samples: int, lr: float, expected: float) -> list[Reading]:
        """The step, unless the device finds something that is not finite: then its kernels change nothing.

        The fused optimizers of torch take that verdict as a tensor. Others, and the first step, which would leave SGD
        with momentum buffers that nobody wrote, wait for it.
        """
        words = self._words.grad
        assert words is not None
        found = self._scale_on_device(words, expected / (words[WEIGHT] * self._gradient.divisor))
        readings = [self._reading(*earlier) for earlier in late.swap(number, samples, lr, words)]
        if self._stepped and getattr(self._optimizer, "_step_supports_amp_scaling", False):
            self._optimizer.found_inf = found  # type: ignore[attr-defined]
            self._optimizer.step()
            del self._optimizer.found_inf  # type: ignore[attr-defined]
        elif not found.item():
            self._optimizer.step()
            self._stepped = True
        if self._buffers is not None:
            self._buffers.bring_back(found)
        return readings

    def _scale_on_device(self, words: Tensor, factor: Tensor) -> Tensor:
        """Scale and clip the gradients; returns 1.0, in words[BAD] too, where one of them or a word is not finite."""
        gradients = [p.grad for p in self._trained if p.grad is not None]
        suspects = words * factor
        if self._clip_norm is not None:
            norm = nn.utils.get_total_norm(gradients) * factor
            suspects = suspects + norm * 0.0
            factor = factor * (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
        found = words[BAD] if words.dtype == torch.float32 else torch.zeros_like(words[BAD], dtype=torch.float32)
        scale_and_check(gradients, factor, suspects, found)
        if words.dtype != torch.float32:
            words[BAD] = found
        return found

    def _reading(
        self, number: int, samples: int, lr: float, weight: float, asked: float, loss: float, bad: float
    ) -> Reading:
        """From the words, as means over the ranks or as sums, and from what the device found."""
        fault: NotFinite | None = None
        if not math.isfinite(loss):
            fault = self._found(loss_fault(number, self._gradient.own_loss(number), self._ranks, self._whole.model))
            return Reading(number, samples, loss / weight if weight else math.nan, lr, asked > 0.0, fault)
        if not 0.0 < weight < math.inf:
            raise TrainingError(
                f"step {number}: the loss's weight is {weight} over all ranks, so their mean is undefined; "
                "the task's loss must return the number of samples or tokens that it counted"
            )
        if bad:
            fault = self._found(NotFinite(number, None, math.nan, what="the gradient"))
        return Reading(number, samples, loss / weight, lr, asked > 0.0, fault)

    def _found(self, fault: NotFinite) -> NotFinite:
        """Errors: the fault itself where the spec says that it ends the run."""
        if self._raises:
            raise fault
        return fault
