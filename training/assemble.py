"""Puts together what the loop joins, from task and data to checkpoints and metrics; refuses what cannot be trained."""

from __future__ import annotations

import hashlib
import random
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from . import optim
from .blocks import order_of
from .checkpoint import Checkpoints
from .config import CheckpointConfig, RunConfig, TrainConfig
from .device import data_type
from .errors import ConfigError, DataError
from .health import Health
from .ledger import Data, Ledger
from .loader import Loader
from .loop import Job, score
from .manifest import Found
from .metrics import Metrics, records
from .order import Slots
from .pace import Pace, history
from .progress import Progress
from .ranks import Ranks
from .reading import init_from
from .replicas import Replicas
from .runfolder import RunFolder, read_json
from .schedule import BatchPlan, check_schedule, scaled_lr
from .shelf import Keep
from .step import Stepper
from .stop import StopFlag
from .task import Task, load_task, source_of
from .wandb_sink import open_sink
from .watchdog import Watchdog
from .words import described


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
    watchdog: Watchdog,
) -> tuple[Job, Found | None]:
    """Everything that the loop needs, resumed from the newest checkpoint if there is one."""
    settings = config.train
    _seed(settings.seed)
    task = load_task(settings)
    data = _open_data(task, settings, plan, ranks)
    dtype = data_type(settings.precision)
    loader = Loader(data.train, settings.data, device, dtype)  # before the model and threads: workers are forked here
    held_out = None if data.held_out is None else Loader(data.held_out, settings.data, device, dtype)
    model, optimizer = _open_model(task, settings, device, plan)
    _seed(_derived(settings.seed, ranks.rank))
    checkpoints = _open_checkpoints(settings.checkpoint, folder, ranks, attempt)
    found = checkpoints.newest()
    order = found.extra.get("gradients", []) if found is not None else []
    stepper = Stepper(task, model, optimizer, settings, ranks, device, order)
    if found is not None:
        check_same_data(data.slots, found)
        check_length(data.total_steps, found)
        checkpoints.load(found, model, optimizer)
    metrics = _open_metrics(config, folder, ranks, attempt, data, stop)
    progress = Progress(data.total_steps, sys.stdout) if ranks.rank == 0 else None
    if found is None and settings.init_from is not None:
        begun = init_from(settings.init_from, model, ranks)
        if progress is not None:
            progress.note(f"begin  with the weights of {begun}")
    return Job(
        config=config,
        ranks=ranks,
        task=task,
        model=model,
        optimizer=optimizer,
        stepper=stepper,
        loader=loader,
        slots=data.slots,
        held_out=held_out,
        total_steps=data.total_steps,
        checkpoints=checkpoints,
        pace=Pace(settings.checkpoint, ranks, found.step if found else 0, *history(folder)),
        ledger=_open_ledger(found, data.slots),
        metrics=metrics,
        progress=progress,
        stop=stop,
        health=Health(settings.health, metrics, progress, found.extra.get("health", {}) if found else {}),
        replicas=Replicas(model, ranks),
        watchdog=watchdog,
        code={"commit": _identity(folder).get("commit"), **source_of(task)},
    ), found


def _open_ledger(found: Found | None, slots: Slots) -> Ledger:
    return Ledger.start(slots) if found is None else Ledger.resume(found.ledger, slots, found.step, found.samples)


def _open_checkpoints(settings: CheckpointConfig, folder: RunFolder, ranks: Ranks, attempt: int) -> Checkpoints:
    keep = Keep(settings.keep_last, settings.keep_every, settings.keep_best is not None)
    pauses = tuple(2.0 * 2**number for number in range(settings.retries))
    strict = settings.on_failure == "stop"
    newer = partial(folder.newer_attempt, attempt)
    checkpoints = Checkpoints(settings.folder or str(folder.checkpoints), keep, ranks, pauses, strict, newer)
    if settings.folder is not None:
        checkpoints.claim(_identity(folder).get("run_id", folder.run_id))
    if ranks.rank == 0 and settings.keep_best is not None:
        for record in records(folder.metrics, "eval"):
            value = score(settings.keep_best, record)
            if value is not None:
                checkpoints.score(int(record["step"]), value)
    return checkpoints


def _identity(folder: RunFolder) -> dict[str, Any]:
    """What `launch` wrote down of the run; empty for a run that it did not start."""
    return dict(read_json(folder.run_json)) if folder.run_json.exists() else {}


def _open_metrics(
    config: RunConfig, folder: RunFolder, ranks: Ranks, attempt: int, data: _Data, stop: StopFlag
) -> Metrics:
    sink = None
    if ranks.rank == 0:
        size = data.slots.plan.global_size
        facts = {"world_size": ranks.world_size, "global_batch_size": size, "total_steps": data.total_steps}
        sink = open_sink(config, folder, attempt, facts)
    return Metrics(folder, ranks, attempt, [sink] if sink is not None else [], stop.ask)


def check_same_data(slots: Slots, found: Found) -> None:
    """Refuse to go on with another global batch or other data than the checkpoint's: steps and order hang on them.

    Errors: ConfigError with the numbers.
    """
    if not found.ledger:
        return
    before, now = found.ledger["data"], asdict(Data.of(slots))
    if before["global_size"] != now["global_size"]:
        plan = slots.plan
        raise ConfigError(
            f"train.batch: {found.name} was trained with a global batch of {before['global_size']}; {plan.per_rank} "
            f"per rank x {plan.accumulate} accumulation x {plan.world_size} ranks make it {plan.global_size}. Set "
            f"train.batch.global: {before['global_size']}, or start a new run with another folder"
        )
    for name, words in (("samples", "data with another number of samples"), ("shards", "data in other shards")):
        if before.get(name) != now[name]:
            raise ConfigError(
                f"train.task: {found.name} was trained on {words}: {before.get(name)!s:.60} then, {now[name]!s:.60} "
                "now. What was seen of it cannot be told: start a new run, with train.init_from for its weights"
            )


def check_length(total_steps: int, found: Found) -> None:
    """Refuse to make a run shorter than it is. Errors: ConfigError with the numbers."""
    if found.step > total_steps:
        raise ConfigError(
            f"train.steps, train.epochs: they make {total_steps} steps, but {found.step} are done ({found.name}); give "
            "at least as many"
        )


def _open_data(task: Task, settings: TrainConfig, plan: BatchPlan, ranks: Ranks) -> _Data:
    train_data = _dataset(task.train_data(), settings, "train_data")
    if not len(train_data):
        raise DataError(f"train.task: {settings.task}: its training data has no sample")
    slots = Slots(
        order_of(train_data, settings.seed, settings.data, plan.global_size),
        plan,
        ranks.rank,
        settings.data.last == "drop",
        filled=settings.reproducible,
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
    held_out = None if held_out is None else _dataset(held_out, settings, "eval_data")
    if held_out is not None and not len(held_out):
        raise DataError(f"train.task: {settings.task}: its evaluation data has no sample; return None for none")
    return _Data(slots, train_data, held_out, total)


def _dataset(found: Any, settings: TrainConfig, method: str) -> Any:
    """Errors: DataError for something that has no length, or no samples to pick by index."""
    if hasattr(found, "__len__") and (hasattr(found, "fetch") or hasattr(found, "__getitem__")):
        return found
    raise DataError(
        f"train.task: {settings.task}: {method} returned a value of type {type(found).__name__}; return something with "
        "a length and either fetch(indices) or [index], such as a list or a torch Dataset, so that order can be kept"
    )


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
    model = task.model()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"train.task: {settings.task}: model() returned {described(model)}; return a torch.nn.Module")
    model = model.to(device=device, dtype=data_type(settings.precision))
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"train.task: {settings.task}: its model has no parameter to train")
    optim.refuse_sparse(model)
    lr, unused_allowed = (
        scaled_lr(settings.optim, plan.global_size),
        bool(getattr(task, "find_unused_parameters", False)),
    )
    return model, optim.build(settings.optim, model.parameters(), lr, unused_allowed)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _derived(seed: int, rank: int) -> int:
    """A seed of a rank's own, for dropout and the like."""
    return int.from_bytes(hashlib.blake2b(f"rank/{seed}/{rank}".encode(), digest_size=7).digest(), "little")
