"""Evaluation on held-out data: every sample counts once, at every world size."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
) -> dict[str, float] | None:
    """Means of the task's metrics over the loader's dataset, the same on all ranks; None when a stop was agreed.

    Sums and weights are added in float64 and reduced once, at the end; nothing is padded or counted twice.
    The model is in eval mode meanwhile and as it was afterwards. A collective.
    """
    slots = Slots(Order(len(loader.dataset), 0, shuffle=False), BatchPlan(per_rank, 1, ranks.world_size), ranks.rank)
    measure = getattr(task, "eval_metrics", None) or _loss_alone(task)
    ahead = Ahead(stop, loader.device)
    totals: dict[str, Tensor] = {}
    was_training = model.training
    model.eval()
    _share_buffers(model, ranks)
    try:
        with torch.no_grad():
            for data in loader.steps(slots, 0, slots.epoch_steps):
                if ahead.poll():
                    ahead.finish()
                    return None
                with autocast(precision, loader.device):
                    measured = measure(model, data.batches[0])
                for name, (value, weight) in _checked(measured).items():
                    _add(totals, name, value, weight, data.idle, loader.device)
                if watchdog is not None:
                    watchdog.beat()
    finally:
        model.train(was_training)
    ahead.finish()
    return _means(totals, ranks)


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


def _add(totals: dict[str, Tensor], name: str, value: Any, weight: Any, idle: bool, device: torch.device) -> None:
    if name not in totals:
        totals[name] = torch.zeros(2, dtype=torch.float64, device=device)
    if not idle:
        totals[name][0] += value
        totals[name][1] += weight


def _means(totals: dict[str, Tensor], ranks: Ranks) -> dict[str, float]:
    names = sorted(totals)
    if ranks.world_size > 1:
        others: list[list[str]] = [[] for _ in range(ranks.world_size)]
        dist.all_gather_object(others, names)
        if any(other != others[0] for other in others):
            found = "; ".join(f"rank {rank}: {', '.join(other) or 'none'}" for rank, other in enumerate(others))
            raise TrainingError(f"the task's eval_metrics gave other metrics on some ranks ({found}); give all on each")
    stacked = torch.stack([totals[name] for name in names])
    if ranks.world_size > 1:
        dist.all_reduce(stacked)
    return {
        name: value / weight if weight else float("nan")
        for name, (value, weight) in zip(names, stacked.tolist(), strict=True)
    }


def _share_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Rank 0's buffers (a batch norm's running means) on all ranks: else each would evaluate a model of its own."""
    if ranks.world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
