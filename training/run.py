"""One attempt of a run on one rank: from a run folder to an outcome."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from . import config as configuration
from . import optim
from .checkpoint import Checkpoints
from .config import RunConfig, TrainConfig
from .device import backend, data_type, open_device
from .errors import ConfigError, DataError
from .loader import Loader
from .loop import Job, Outcome, run_evaluation, train
from .manifest import Found
from .metrics import Metrics
from .order import Order, Slots
from .progress import Progress
from .ranks import Ranks
from .runfolder import RunFolder
from .schedule import BatchPlan, arithmetic_lines, batch_plan, check_schedule, scaled_lr
from .step import Stepper
from .stop import StopFlag, agreed, handlers
from .task import Task, load_task
from .wandb_sink import open_sink

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longest wait in a collective: longer than any save or evaluation batch, shorter than torch's half hour."""
_kept: list[Any] = []
"""Process groups that were left. Their C++ destructor joins gloo's threads while it holds the GIL, which such a thread
may be waiting for to drop a tensor: a deadlock, seen in one run of about twenty. So it never runs."""

FAILED, TERMINATED = 5, 143
"""Exit codes that metrics sinks are told of; a rank ends in the same ones."""


def run(folder: RunFolder, ranks: Ranks, attempt: int, stop: StopFlag | None = None) -> Outcome:
    """Train what the folder's spec says, from its newest checkpoint on. Called by every rank; RANK and its kin are set.

    `stop`: a flag whose signal handlers the caller has installed; None installs them for the call (main thread only).
    Errors: TrainingError for what the user can act on, on every rank that meets it; others pass as they are, and the
    process group is then left as it is, because leaving it could hang.
    """
    if stop is None:
        with handlers(StopFlag()) as own:
            return run(folder, ranks, attempt, own)
    config = configuration.load(folder.spec)
    _set_threads()
    device = open_device(config.train.device, ranks)
    plan = batch_plan(config.train.batch, ranks.world_size)
    with process_group(ranks, device):
        job, found = _build(config, folder, ranks, attempt, stop, device, plan)
        try:
            _announce(job, folder, found, device)
            outcome = _finish(job, folder, found)
        except Exception:
            job.metrics.close(FAILED)
            raise
        if job.progress is not None:
            if outcome.kind == "stopped":
                job.progress.note(f"stopped at step {outcome.step}/{job.total_steps} ({outcome.reason or 'asked'})")
            job.progress.close()
        job.metrics.close(0 if outcome.kind == "done" else TERMINATED)
    return outcome


def _finish(job: Job, folder: RunFolder, found: Found | None) -> Outcome:
    """Train what is left; of a run whose last step is done already, at most the evaluation is."""
    if found is None or found.step < job.total_steps:
        return train(job, found.step if found else 0, found.samples if found else 0)
    done = Outcome("done", found.step, found.samples)
    if job.held_out is None or not job.config.train.eval.at_end:
        return done
    results = last_evaluation(folder, found.step) if job.ranks.rank == 0 else None
    if not agreed(StopFlag(asked=results is not None)):
        results = run_evaluation(job, found.step, found.samples)
        if results is None:
            return Outcome("stopped", found.step, found.samples, reason=job.stop.reason)
    return Outcome("done", found.step, found.samples, results or {})


def last_evaluation(folder: RunFolder, step: int) -> dict[str, float] | None:
    """Results of an evaluation at a step that the metrics file already has. A torn last line counts as none."""
    if not folder.metrics.exists():
        return None
    for line in reversed(folder.metrics.read_text(encoding="utf-8").splitlines()):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("kind") == "eval" and record.get("step") == step:
            known = ("step", "samples", "attempt", "time")
            return {k: v for k, v in record.items() if isinstance(v, float) and k not in known}
    return None


@contextmanager
def process_group(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """The default process group, from MASTER_ADDR and MASTER_PORT; none for a single process.

    It is left only when the block ends well: after an error, other ranks may be stuck in a collective.
    """
    if ranks.world_size == 1:
        yield
        return
    dist.init_process_group(
        backend(device),
        init_method="env://",
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    yield
    _kept.append(dist.group.WORLD)
    dist.destroy_process_group()


@dataclass(frozen=True)
class _Data:
    slots: Slots
    train: Any
    held_out: Any
    total_steps: int


def _build(
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
    checkpoints = Checkpoints(
        settings.checkpoint.folder or str(folder.checkpoints), settings.checkpoint.keep_last, ranks
    )
    found = checkpoints.newest()
    if found is not None:
        check_same_batch(settings, plan, found)
        checkpoints.load(found, model, optimizer)
    dtype = data_type(settings.precision)
    sink = None
    if ranks.rank == 0:
        facts = {"world_size": ranks.world_size, "global_batch_size": plan.global_size, "total_steps": data.total_steps}
        sink = open_sink(config, folder, attempt, facts)
    job = Job(
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
        metrics=Metrics(folder, ranks, attempt, [sink] if sink is not None else []),
        progress=Progress(data.total_steps, sys.stdout) if ranks.rank == 0 else None,
        stop=stop,
    )
    return job, found


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


def _announce(job: Job, folder: RunFolder, found: Found | None, device: torch.device) -> None:
    if job.progress is None:
        return
    world = job.ranks.world_size
    job.progress.note(f"run    {folder.run_id}  {folder.path}")
    for line in arithmetic_lines(job.config.train, job.slots.plan, job.total_steps):
        job.progress.note(line)
    kind = device.type if device.type == "cpu" else torch.cuda.get_device_name(device)
    job.progress.note(f"ranks  {world} on {kind}, {job.config.train.precision}, {len(job.loader.dataset)} samples")
    if found is not None:
        job.progress.note(f"resume {found.name}: step {found.step}/{job.total_steps}, {found.samples} samples seen")


def _set_threads() -> None:
    """OMP_NUM_THREADS once more: a rank forked from a process that had torch already would not have read it."""
    count = os.environ.get("OMP_NUM_THREADS", "")
    if count.isdigit() and int(count) > 0:
        torch.set_num_threads(int(count))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _derived(seed: int, rank: int) -> int:
    """A seed of a rank's own, for dropout and the like."""
    return int.from_bytes(hashlib.blake2b(f"rank/{seed}/{rank}".encode(), digest_size=7).digest(), "little")
