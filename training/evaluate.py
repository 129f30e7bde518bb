"""Evaluation on held-out data: every sample counts once, at every world size."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .deterministic import explained
from .device import autocast
from .errors import TrainingError
from .loader import Loader
from .order import Order, Slots
from .ranks import Ranks
from .schedule import BatchPlan
from .stop import Ahead, StopFlag
from .task import Task
from .watchdog import Watchdog
from .words import described


def evaluate(
    task: Task,
    model: nn.Module,
    loader: Loader,
    per_rank: int,
    precision: str,
    ranks: Ranks,
    stop: StopFlag,
    watchdog: Watchdog | None = None,
    reproducible: bool = False,
) -> dict[str, float] | None:
    """Means of the task's metrics over the loader's dataset, the same on all ranks; None when a stop was agreed.

    Sums and weights are added in float64 and reduced once, at the end; nothing is padded or counted twice. The model is
    in eval mode meanwhile and as it was afterwards. A collective. `reproducible`: the same bits at any world size, from
    the same batches, which are added in their order. Errors: TrainingError for other results, and as `explained`.
    """
    order, plan = Order(len(loader.dataset), 0, shuffle=False), BatchPlan(per_rank, 1, ranks.world_size)
    slots = Slots(order, plan, ranks.rank, filled=reproducible)
    measure = getattr(task, "eval_metrics", None) or _loss_alone(task)
    ahead = Ahead(stop, loader.device)
    totals = _Totals(slots.epoch_steps if reproducible else 1, loader.device)
    was_training = model.training
    model.eval()
    _share_buffers(model, ranks)
    try:
        with torch.no_grad(), explained():
            for number, data in enumerate(loader.steps(slots, 0, slots.epoch_steps)):
                if ahead.poll():
                    ahead.finish()
                    return None
                with autocast(precision, loader.device):
                    measured = measure(model, data.batches[0])
                totals.add(number, _checked(measured), data.idle)
                if watchdog is not None:
                    watchdog.beat()
    finally:
        model.train(was_training)
    ahead.finish()
    return _means(totals.by_name, ranks, reproducible)


def _checked(measured: Any) -> dict[str, tuple[Any, Any]]:
    if isinstance(measured, dict) and measured:
        wrong = [name for name, pair in measured.items() if not isinstance(pair, tuple) or len(pair) != 2]
        if not wrong:
            return measured
        what = f"{described(measured[wrong[0]])} for {wrong[0]!r}"
    else:
        what = "no metric" if isinstance(measured, dict) else described(measured)
    raise TrainingError(
        f"the task's eval_metrics returned {what}; return a mapping from each name to two values: the sum over the "
        'batch\'s samples or tokens, and their number, such as {"accuracy": (correct, samples)}'
    )


def _loss_alone(task: Task) -> Any:
    return lambda model, batch: {"loss": task.loss(model, batch)}


class _Totals:
    """This rank's sums and weights."""

    def __init__(self, rows: int, device: torch.device) -> None:
        """`rows`: 1, or a row for each of the rank's batches."""
        self.by_name: dict[str, Tensor] = {}
        """float64 of shape (rows, 2)."""
        self._rows, self._device = rows, device

    def add(self, number: int, measured: dict[str, tuple[Any, Any]], idle: bool) -> None:
        """Of batch `number`, from 0; of an `idle` one only the names count."""
        for name, (value, weight) in measured.items():
            if name not in self.by_name:
                self.by_name[name] = torch.zeros(self._rows, 2, dtype=torch.float64, device=self._device)
            if not idle:
                self.by_name[name][number % self._rows, 0] += value
                self.by_name[name][number % self._rows, 1] += weight


def _means(totals: dict[str, Tensor], ranks: Ranks, reproducible: bool) -> dict[str, float]:
    names = sorted(totals)
    if ranks.world_size > 1:
        others: list[list[str]] = [[] for _ in range(ranks.world_size)]
        dist.all_gather_object(others, names)
        if any(other != others[0] for other in others):
            found = "; ".join(f"rank {rank}: {', '.join(other) or 'none'}" for rank, other in enumerate(others))
            raise TrainingError(f"the task's eval_metrics gave other metrics on some ranks ({found}); give all on each")
    stacked = torch.stack([totals[name] for name in names])
    if ranks.world_size > 1 and reproducible:
        seen = [torch.empty_like(stacked) for _ in range(ranks.world_size)]
        dist.all_gather(seen, stacked)
        stacked = torch.stack(seen, dim=2).flatten(1, 2)  # a round of the ranks' batches after the other
    elif ranks.world_size > 1:
        dist.all_reduce(stacked)
    sums = [[sum(column) for column in zip(*rows, strict=True)] for rows in stacked.tolist()]
    return {name: value / weight if weight else float("nan") for name, (value, weight) in zip(names, sums, strict=True)}


def _share_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Rank 0's buffers (a batch norm's running means) on all ranks: else each would evaluate a model of its own."""
    if ranks.world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
