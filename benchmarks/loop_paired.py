"""Our loop beside a bare one in the same processes, blocks of steps in turn: what its guarantees cost.

Runs in processes of their own differ by up to 20%; blocks that follow each other in the same ones, by chance only.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from loop_common import LR_WARMUP_STEPS, MICRO_BATCH, PEAK_LR, source
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training.config import DataConfig, ScheduleConfig
from training.exchange import Exchange
from training.loader import Loader
from training.optim import set_lr
from training.order import Indices, Order, Slots
from training.ranks import Ranks
from training.schedule import BatchPlan, lr_at


class Bare:
    """The same order, batches, model, exchange of gradients, learning rate and optimizer as in ours, and no more.

    Left out: stop agreement and exact weights (the words), checks for what is not finite, ledger, metrics, progress,
    watchdog, and whether a save or an evaluation is due.
    """

    def __init__(self, data: str, total: int) -> None:
        ranks, task, self._total = Ranks.from_environment(os.environ), source(data), total
        self._model = DistributedDataParallel(_WithLoss(task), gradient_as_bucket_view=True)
        exchange = Exchange(ranks)
        self._model.register_comm_hook(None, lambda _, bucket: exchange.average(bucket))
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=PEAK_LR, weight_decay=0.0, fused=True)
        self._schedule = ScheduleConfig(warmup_steps=LR_WARMUP_STEPS, decay="cosine")
        dataset, plan = task.train_data(), BatchPlan(MICRO_BATCH, 1, ranks.world_size)
        slots = Slots(Order(len(dataset), 0), plan, ranks.rank, drop_last=True)
        self._steps = enumerate(Loader(dataset, DataConfig(), torch.device("cpu")).steps(slots, 0, total))
        self._root = torch.tensor(ranks.world_size / plan.global_size)

    def run(self, count: int) -> None:
        """So many steps."""
        for _, (step, data) in zip(range(count), self._steps, strict=False):
            for batch in data.batches:
                torch.autograd.backward((self._model(batch),), (self._root,))
            set_lr(self._optimizer, lr_at(step, PEAK_LR, self._schedule, self._total))
            self._optimizer.step()
            for parameter in self._parameters:
                parameter.grad = None


class _WithLoss(nn.Module):
    def __init__(self, task: Any) -> None:
        super().__init__()
        self.model: nn.Module = task.model()
        self._parts = task, self.model

    def forward(self, batch: Any) -> Tensor:
        task, model = self._parts
        loss: Tensor = task.loss(model, batch)[0]
        return loss


class Paired:
    """A user's task whose data interrupts our loop after each block of steps, to let the bare one take as many."""

    def __init__(self, data: str, block: int, blocks: int, result: str) -> None:
        """Rank 0 leaves, in `result`, the seconds of each block: [ours, bare]."""
        self._task, self._data = source(data), data
        self._block, self._blocks, self._result = block, blocks, Path(result)
        self._fetched, self._began = 0, 0.0
        self._bare: Bare | None = None
        self._seconds: list[tuple[float, float]] = []

    @staticmethod
    def steps(block: int, blocks: int) -> int:
        """Steps of our loop that this takes: one block more comes first, and a step to see the last one end."""
        return block * (blocks + 1) + 1

    def model(self) -> nn.Module:
        model: nn.Module = self._task.model()
        return model

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        result: tuple[Tensor, float] = self._task.loss(model, batch)
        return result

    def train_data(self) -> _Interrupting:
        return _Interrupting(self._task.train_data(), self)

    def step(self) -> None:
        """Our loop begins a step."""
        taken, self._fetched = self._fetched, self._fetched + 1
        if not taken or taken % self._block:
            return
        now = time.perf_counter()
        if self._bare is None:
            with torch.random.fork_rng():
                self._bare = Bare(self._data, self.steps(self._block, self._blocks))
            self._bare.run(self._block)
        else:
            self._bare.run(self._block)
            self._seconds.append((now - self._began, time.perf_counter() - now))
            if len(self._seconds) == self._blocks and os.environ["RANK"] == "0":
                self._result.write_text(json.dumps(self._seconds))
        self._began = time.perf_counter()


class _Interrupting:
    """The data of a task."""

    def __init__(self, data: Any, paired: Paired) -> None:
        self._data, self._paired = data, paired

    def __len__(self) -> int:
        return len(self._data)

    def fetch(self, indices: Indices) -> Any:
        self._paired.step()
        return self._data.fetch(indices)
