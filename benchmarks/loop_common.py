"""What all contestants of benchmarks/loop.py share: data, model, learning rate, the precomputed gathers, the clock."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from training.tasks.digits import Digits
from training.tasks.synthetic import Synthetic

MICRO_BATCH = 32
PEAK_LR = 1e-3
LR_WARMUP_STEPS = 50


def source(data: str) -> Any:
    """The task whose data and model all use: synthetic (784-256-10) or digits (64-256-10)."""
    return Synthetic() if data == "synthetic" else Digits()


def tensors(task: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (samples, width) and classes (samples,) of the task's training data, in memory."""
    data = task.train_data()
    return (data.features, data.classes) if isinstance(task, Synthetic) else (data.pixels, data.digits)


def lr_factor(step: int, total: int) -> float:
    """Linear warmup, then half a cosine down to 0, as a share of the peak; `step` counts from 0."""
    if step < LR_WARMUP_STEPS:
        return (step + 1) / LR_WARMUP_STEPS
    done = min(1.0, (step - LR_WARMUP_STEPS) / (total - LR_WARMUP_STEPS))
    return 0.5 * (1.0 + math.cos(math.pi * done))


class Gathers:
    """An epoch's batches of one rank, gathered from the in-memory tensors by a permutation that is made once an epoch.

    The last, smaller batches are left out, as drop_last does.
    """

    def __init__(self, features: torch.Tensor, classes: torch.Tensor, rank: int, world_size: int) -> None:
        self._features, self._classes = features, classes
        self._rank, self._world_size = rank, world_size
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._classes) // (self._world_size * MICRO_BATCH)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self._epoch += 1
        order = torch.randperm(len(self._classes), generator=torch.Generator().manual_seed(self._epoch))
        own = order[self._rank :: self._world_size][: len(self) * MICRO_BATCH].view(-1, MICRO_BATCH)
        for picked in own.unbind():
            yield self._features[picked], self._classes[picked]


class Clock:
    """Seconds between the beginning of step `warm_up` and of step `warm_up + steps`, counted from 0.

    Every contestant calls `tick` where its step begins. A call costs a tenth of a microsecond.
    """

    def __init__(self, warm_up: int, steps: int, result: str, rank: int) -> None:
        self._first, self._last = warm_up + 1, warm_up + steps + 1
        self._steps, self._result, self._rank = steps, Path(result), rank
        self._ticks, self._began = 0, 0.0

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks == self._first:
            self._began = time.perf_counter()
        elif self._ticks == self._last and self._rank == 0:
            seconds = (time.perf_counter() - self._began) / self._steps
            self._result.write_text(json.dumps({"us_per_step": 1e6 * seconds}))


def total_steps(warm_up: int, steps: int) -> int:
    """Steps that a contestant takes: one more than are measured, so that the last of these is seen to end."""
    return warm_up + steps + 1
