"""Puts together what the loop joins, from task and data to checkpoints and metrics; refuses what cannot be trained."""

from __future__ import annotations

import hashlib
import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import optim
from .checkpoint import Checkpoints
from .config import RunConfig, TrainConfig
from .device import data_type
from .errors import ConfigError, DataError
from .loader import Loader
from .loop import Job
from .manifest import Found
from .metrics import Metrics
from .order import Order, Slots
from .progress import Progress
from .ranks import Ranks
from .runfolder import RunFolder
from .schedule import BatchPlan, batch_plan, check_schedule, scaled_lr
from .shelf import Keep
from .step import Stepper
from .stop import StopFlag
from .task import Task, load_task
from .wandb_sink import open_sink


@dataclass(frozen=True)
class _Data:
    slots: Slots
    train: Any
    held_out: Any
    total_steps: int


def assemble(
    config: RunConfig,
    folder: RunFolder,
    ranks: Ranks,
    attempt: int,
    stop: StopFlag,
    device: torch.device,
    plan: BatchPlan,
) -> tuple[Job, Found | None]:
    """Everything that the loop needs, resumed from the newest checkpoint if there is one."""
    settings = config.train
    _seed(settings.seed)
    task = load_task(settings)
    data = _open_data(task, settings, plan, ranks)
    model, optimizer = _open_model(task, settings, device, plan)
    _seed(_derived(settings.seed, ranks.rank))
    stepper = Stepper(task, model, optimizer, settings, ranks, device)
    place = settings.checkpoint.folder or str(folder.checkpoints)
    checkpoints = Checkpoints(place, Keep(settings.checkpoint.keep_last), ranks)
    found = checkpoints.newest()
    if found is not None:
        check_same_batch(settings, plan, found)
        checkpoints.load(found, model, optimizer)
    dtype = data_type(settings.precision)
    return Job(
        config=config,
        ranks=ranks,
        task=task,
        model=model,
        optimizer=optimizer,
        stepper=stepper,
        loader=Loader(data.train, settings.data, device, dtype),
        slots=data.slots,
        held_out=Loader(data.held_out, settings.data, device, dtype) if data.held_out is not None else None,
        total_steps=data.total_steps,
        checkpoints=checkpoints,
        metrics=_open_metrics(config, folder, ranks, attempt, data),
        progress=Progress(data.total_steps, sys.stdout) if ranks.rank == 0 else None,
        stop=stop,
    ), found


def _open_metrics(config: RunConfig, folder: RunFolder, ranks: Ranks, attempt: int, data: _Data) -> Metrics:
    sink = None
    if ranks.rank == 0:
        size = data.slots.plan.global_size
        facts = {"world_size": ranks.world_size, "global_batch_size": size, "total_steps": data.total_steps}
        sink = open_sink(config, folder, attempt, facts)
    return Metrics(folder, ranks, attempt, [sink] if sink is not None else [])


def check_same_batch(settings: TrainConfig, plan: BatchPlan, found: Found) -> None:
    """Refuse to go on with another global batch than the checkpoint's: steps, order and learning rate hang on it.

    Errors: ConfigError with the numbers.
    """
    if settings.batch.global_size is not None:
        return  # the same at every world size
    before = batch_plan(settings.batch, found.world_size).global_size
    if before != plan.global_size:
        raise ConfigError(
            f"train.batch: {found.name} was trained by {found.world_size} ranks with a global batch of {before}; "
            f"{plan.world_size} ranks with {plan.per_rank} each would make it {plan.global_size}. Set "
            f"train.batch.global: {before}, or resume with {found.world_size} ranks"
        )


def _open_data(task: Task, settings: TrainConfig, plan: BatchPlan, ranks: Ranks) -> _Data:
    train_data = task.train_data()
    if not len(train_data):
        raise DataError(f"train.task: {settings.task}: its training data has no sample")
    slots = Slots(
        Order(len(train_data), settings.seed, settings.data.shuffle), plan, ranks.rank, settings.data.last == "drop"
    )
    if not slots.epoch_samples:
        raise ConfigError(
            f"train.data.last: drop leaves nothing of {len(train_data)} samples in global batches of "
            f"{plan.global_size}; use keep, or a smaller batch"
        )
    total = total_steps(settings, slots)
    check_schedule(settings.schedule, total)
    opener = getattr(task, "eval_data", None)
    held_out = opener() if opener is not None else None
    if held_out is not None and not len(held_out):
        raise DataError(f"train.task: {settings.task}: its evaluation data has no sample; return None for none")
    return _Data(slots, train_data, held_out, total)


def total_steps(settings: TrainConfig, slots: Slots) -> int:
    """Optimizer steps of the whole run. Errors: ConfigError unless exactly one of epochs and steps is given."""
    if (settings.epochs is None) == (settings.steps is None):
        raise ConfigError(f"train: epochs is {settings.epochs} and steps is {settings.steps}; give one of them")
    total = settings.steps if settings.steps is not None else (settings.epochs or 0) * slots.epoch_steps
    if total < 1:
        raise ConfigError(f"train: epochs: {settings.epochs}, steps: {settings.steps} make no step; give at least 1")
    return total


def _open_model(
    task: Task, settings: TrainConfig, device: torch.device, plan: BatchPlan
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    _seed(settings.seed)  # again: what the task drew for its data does not reach the initial model
    model = task.model().to(device=device, dtype=data_type(settings.precision))
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"train.task: {settings.task}: its model has no parameter to train")
    return model, optim.build(settings.optim, model.parameters(), scaled_lr(settings.optim, plan.global_size))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _derived(seed: int, rank: int) -> int:
    """A seed of a rank's own, for dropout and the like."""
    return int.from_bytes(hashlib.blake2b(f"rank/{seed}/{rank}".encode(), digest_size=7).digest(), "little")
