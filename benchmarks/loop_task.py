"""Our own contestant in benchmarks/loop.py: a user's task, which is one of the example tasks with the clock in it."""

import os
from typing import Any

from loop_common import Clock, source
from torch import Tensor, nn


class Measured:
    """Its model, data and loss are those of `data`: synthetic or digits. There is no evaluation."""

    def __init__(self, data: str, warm_up: int, steps: int, result: str) -> None:
        self._task = source(data)
        self._loss = self._task.loss
        self._tick = Clock(warm_up, steps, result, int(os.environ["RANK"])).tick

    def model(self) -> nn.Module:
        model: nn.Module = self._task.model()
        return model

    def train_data(self) -> Any:
        return self._task.train_data()

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        self._tick()
        result: tuple[Tensor, float] = self._loss(model, batch)
        return result
