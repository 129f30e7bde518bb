"""The words: a few numbers of each rank that travel with the gradients, in DDP's own exchange of them.

DDP wraps the model together with a four-number parameter, the words. Its "gradient" on each rank is set to that
rank's (weight, asked to stop, loss, 0), and DDP averages it like any other. Every rank thus reads the same words at the
same step, at no further collective. The fourth is free for what is found about the gradients after that, on a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import NotFinite, TrainingError
from .task import Task

WORDS = "the words"
"""Their name among the parameters' names."""
WEIGHT, STOP, LOSS, BAD = 0, 1, 2, 3
COUNT = 4


class Reading(NamedTuple):
    """What all ranks know about a step once it is done: the same on each of them."""

    step: int
    """1-based number of the step."""
    samples: int
    """Samples consumed by all ranks after it."""
    loss: float
    """Mean loss of the global batch before the step: sum of losses / sum of weights."""
    lr: float
    stop: bool
    """Some rank had been asked to stop when the step began."""
    fault: NotFinite | None = None
    """The step's loss or a gradient was not finite: it changed no parameter and no state of the optimizer."""


class Whole(nn.Module):
    """What DDP wraps: the model with its loss, and the words."""

    def __init__(
        self, task: Task, model: nn.Module, device: torch.device, traced: bool, order: Sequence[str] = ()
    ) -> None:
        """`order`: names as in `trained`, in which DDP is to take the parameters; of no effect if of another model."""
        super().__init__()
        self.model = model
        double = any(p.dtype == torch.float64 for p in model.parameters())
        # Sums above 2^24 samples lose their last bits in fp32, relatively no more than each gradient element does.
        # A type of its own would cost a second bucket, which is a second collective.
        words = nn.Parameter(torch.zeros(COUNT, dtype=torch.float64 if double else torch.float32, device=device))
        known = {name: p for name, p in model.named_parameters() if p.requires_grad} | {WORDS: words}
        if set(order) == set(known):
            for place, name in enumerate(order):  # DDP takes a parameter where it comes first, and this module is first
                self.register_parameter(f"p{place}", known[name])
        self.words = words
        self.trained = known
        """By name, what gets a gradient: the model's parameters, and the words."""
        self._parts = task.loss, model, words, traced  # a module finds its own parameters and modules slowly

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | float, Tensor]:
        """The task's (loss sum, weight), and the words: a view of them where DDP traces its outputs for parameters.

        Errors: TrainingError for a loss that is something else.
        """
        task_loss, model, words, traced = self._parts
        found = task_loss(model, batch)
        if type(found) is not tuple or len(found) != 2 or not isinstance(found[0], Tensor):
            raise TrainingError(
                f"the task's loss returned {described(found)}; return two values: the loss summed over the batch's "
                "samples or tokens, as a tensor, and their number"
            )
        loss, weight = found
        if loss.dim():
            raise TrainingError(f"the task's loss has shape {tuple(loss.shape)}; return the sum, a scalar")
        if not loss.requires_grad:
            raise TrainingError(
                "the task's loss does not depend on the model's parameters; return the sum as torch computed it, "
                "without detach(), item() or no_grad"
            )
        return loss, weight, words.view(-1) if traced else words


def described(value: Any) -> str:
    """What a user's method returned, in a few words."""
    if isinstance(value, Tensor):
        return f"one tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return f"a value of type {type(value).__name__}"


class Own:
    """This rank's words of a step. Two sets in turn: on a CUDA device the one before is still to be read."""

    def __init__(self, words: Tensor) -> None:
        self._values = [torch.zeros_like(words, requires_grad=False) for _ in range(2)]
        self._slots = [values.unbind() for values in self._values]
        self._written = [[0.0, 0.0], [0.0, 0.0]]

    def write(self, number: int, weight: Tensor | float, stop: bool, loss: Tensor) -> Tensor:
        """Put the words of step `number` together, writing only what changed; float tensor of shape (4,)."""
        slots, written = self._slots[number % 2], self._written[number % 2]
        if isinstance(weight, Tensor):
            slots[WEIGHT].copy_(weight.detach())
            written[WEIGHT] = math.nan
        elif written[WEIGHT] != weight:
            slots[WEIGHT].fill_(weight)
            written[WEIGHT] = weight
        if written[STOP] != stop:
            slots[STOP].fill_(stop)
            written[STOP] = stop
        slots[LOSS].copy_(loss)
        return self._values[number % 2]

    def loss(self, number: int) -> Tensor:
        """This rank's loss sum of step `number`, which is the last or the one before."""
        return self._slots[number % 2][LOSS]


def total(mean: float, world_size: int, epsilon: float) -> float:
    """The sum over the ranks, from DDP's mean, without the rounding of its division when the sum is whole.

    `epsilon` is that of the words' type.
    """
    found = mean * world_size
    if not math.isfinite(found):
        return found
    nearest = round(found)
    return float(nearest) if abs(found - nearest) <= world_size * epsilon * abs(found) else found


class Late:
    """Averaged words on their way from a device: copied to pinned memory without waiting, read one step later."""

    def __init__(self, words: Tensor) -> None:
        self._host = [torch.empty(COUNT, dtype=words.dtype, pin_memory=words.is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if words.is_cuda else []  # type: ignore[no-untyped-call]
        self._waiting: tuple[int, int, float] | None = None

    def swap(self, number: int, samples: int, lr: float, words: Tensor) -> list[tuple[Any, ...]]:
        """Start this step's copy; return (number, samples, lr, weight, stop, loss, bad) of the step before."""
        self._host[number % 2].copy_(words, non_blocking=True)
        if self._copied:
            self._copied[number % 2].record()
        earlier = self.drain()
        self._waiting = number, samples, lr
        return earlier

    def drain(self) -> list[tuple[Any, ...]]:
        """Wait for the copy that is under way, if there is one, and return it."""
        if self._waiting is None:
            return []
        waiting, self._waiting = self._waiting, None
        if self._copied:
            self._copied[waiting[0] % 2].synchronize()
        return [(*waiting, *self._host[waiting[0] % 2].tolist())]
