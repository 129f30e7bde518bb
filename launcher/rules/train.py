"""Rules about the training loop: what it cannot compute is refused before a job is submitted."""

from __future__ import annotations

import math
import re

from training.config import BatchConfig, OptimConfig, TrainConfig
from training.errors import ConfigError
from training.schedule import BatchPlan, batch_plan, check_schedule
from training.tasks import OPTIONS

from ..reading.schema import did_you_mean
from ..spec import JobSpec
from .report import Report

BUILT_IN_TASKS = tuple(OPTIONS)
DIGITS_TRAINING_SAMPLES = 1437
"""Training images of the built-in task `digits`; it takes no option that changes them."""

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_UNKNOWN_LENGTH = 10**18
"""Steps of a run whose length needs the data: long enough for any warmup, so that only the other rules speak."""


def check_train(spec: JobSpec, report: Report) -> None:
    """Check the section train; nothing to do where there is none."""
    config = spec.train
    if config is None:
        return
    _check_task(config.task, report)
    _check_options(config, report)
    _check_length(config, report)
    _check_optim(config.optim, report)
    _check_at_least(config, report)
    _check_health(config, report)
    _check_reproducible(config, report)
    plan = _check_batch(config.batch, spec.resources.nodes * spec.resources.tasks_per_node, report)
    _check_schedule(config, plan, report)


def _check_task(task: str, report: Report) -> None:
    if task in BUILT_IN_TASKS or _IMPORT_PATH.fullmatch(task):
        return
    right = did_you_mean(task, list(BUILT_IN_TASKS))
    if not right.startswith("did"):
        right = f"write one of {', '.join(BUILT_IN_TASKS)}, or your own as package.module:Class"
    report.add("train.task", f"{task!r} is neither a built-in task nor an import path", right)


def _check_options(config: TrainConfig, report: Report) -> None:
    """Options of built-in tasks. Those of a user's own are known only where it can be imported: on the ranks."""
    known = OPTIONS.get(config.task)
    for name, value in config.options.items() if known is not None else ():
        assert known is not None
        path = f"train.options.{name}"
        if name not in known:
            right = did_you_mean(name, list(known))
            right = right if right.startswith("did") else f"it takes {', '.join(known)}"
            report.add(path, f"the task {config.task} has no such option", right)
        elif isinstance(value, bool) or not isinstance(value, (int, float) if known[name] is float else int):
            kind = "a number" if known[name] is float else "a whole number"
            report.add(path, f"{value!r} is of the wrong type", f"give {kind}")
        elif known[name] is int and value < 1:
            report.add(path, f"{value} is out of range", "give at least 1")


def _check_length(config: TrainConfig, report: Report) -> None:
    if config.epochs is None and config.steps is None:
        report.add("train.epochs", "neither epochs nor steps is given", "give one of the two", "train.steps")
    if config.epochs is not None and config.steps is not None:
        report.add("train.steps", "both epochs and steps are given", "keep one, set the other null", "train.epochs")


def _check_optim(optim: OptimConfig, report: Report) -> None:
    def need(key: str, holds: bool, rule: str) -> None:
        if not holds:
            report.add(f"train.optim.{key}", f"{getattr(optim, key)} is out of range", rule)

    need("base_lr", 0 < optim.base_lr < math.inf, "a learning rate is above 0")
    need("base_batch", optim.base_batch is None or optim.base_batch >= 1, "give at least one sample")
    need("weight_decay", 0 <= optim.weight_decay < math.inf, "give 0 or more")
    need("eps", 0 < optim.eps < math.inf, "give more than 0")
    need("momentum", 0 <= optim.momentum < 1, "give 0 or more, below 1")
    need("clip_norm", optim.clip_norm is None or 0 < optim.clip_norm < math.inf, "give more than 0, or null")
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        report.add("train.optim.betas", f"{optim.betas} are no two decay rates", "give two numbers from 0 to below 1")
    if optim.momentum and optim.name != "sgd":
        wrong = f"has no effect with {optim.name}"
        report.add("train.optim.momentum", wrong, "it is for sgd: remove it, or set name: sgd", "train.optim.name")
    if optim.nesterov and (optim.name != "sgd" or not optim.momentum):
        right = "it needs name: sgd and a momentum above 0"
        report.add("train.optim.nesterov", "cannot be used here", right, "train.optim.name", "train.optim.momentum")


def _check_at_least(config: TrainConfig, report: Report) -> None:
    """The plain lower bounds of whole numbers."""
    bounds: dict[str, tuple[int | None, int]] = {
        "seed": (config.seed, 0),
        "epochs": (config.epochs, 1),
        "steps": (config.steps, 1),
        "schedule.warmup_steps": (config.schedule.warmup_steps, 0),
        "schedule.decay_steps": (config.schedule.decay_steps, 1),
        "data.workers": (config.data.workers, 0),
        "data.prefetch": (config.data.prefetch, 1),
        "data.lanes": (config.data.lanes, 1),
        "data.window": (config.data.window, 1),
        "eval.every_steps": (config.eval.every_steps, 1),
        "eval.per_rank": (config.eval.per_rank, 1),
        "checkpoint.every_steps": (config.checkpoint.every_steps, 1),
        "checkpoint.keep_last": (config.checkpoint.keep_last, 1),
        "checkpoint.keep_every": (config.checkpoint.keep_every, 1),
        "checkpoint.retries": (config.checkpoint.retries, 0),
        "log.every_steps": (config.log.every_steps, 1),
        "health.rollback_steps": (config.health.rollback_steps, 1),
        "health.max_skips": (config.health.max_skips, 1),
        "health.replica_every_steps": (config.health.replica_every_steps, 1),
        "health.hang_timeout_s": (config.health.hang_timeout_s, 1),
        "batch.per_rank": (config.batch.per_rank, 1),
        "batch.global": (config.batch.global_size, 1),
        "batch.accumulate": (config.batch.accumulate, 1),
    }
    for key, (value, least) in bounds.items():
        if value is not None and not least <= value < 2**63:
            right = f"give at least {least}" if value < least else "give a number below 2^63"
            report.add(f"train.{key}", f"{value} is out of range", right)


def _check_health(config: TrainConfig, report: Report) -> None:
    """A rollback needs a checkpoint that is old enough, and still there."""
    health, checkpoint = config.health, config.checkpoint
    if health.not_finite != "rollback" or not report.usable("train.health", "train.checkpoint"):
        return
    if checkpoint.every_steps is None and checkpoint.every_minutes is None and not checkpoint.auto:
        wrong = "rollback, but no checkpoint is saved before the run's end"
        report.add("train.health.not_finite", wrong, "set train.checkpoint.every_steps", "train.checkpoint.every_steps")
    elif checkpoint.every_steps is not None and checkpoint.every_minutes is None and not checkpoint.auto:
        most = (checkpoint.keep_last - 1) * checkpoint.every_steps + 1
        if health.rollback_steps > most:
            wrong = f"{health.rollback_steps}: a checkpoint as old as that may be gone"
            right = f"{checkpoint.keep_last} are kept, {checkpoint.every_steps} steps apart: give at most {most}"
            kept = ("train.checkpoint.keep_last", "train.checkpoint.every_steps")
            report.add("train.health.rollback_steps", wrong, f"{right}, or raise keep_last", *kept)


def _check_reproducible(config: TrainConfig, report: Report) -> None:
    """Its micro-batches have to be the same ones at each number of ranks."""
    batch = config.batch
    if config.reproducible and batch.per_rank is None and batch.global_size is not None:
        wrong = "not given, so micro-batches would be smaller on more ranks, and reproducible is true"
        right = f"say how many samples of the {batch.global_size} make a micro-batch"
        report.add("train.batch.per_rank", wrong, right, "train.batch", "train.reproducible")


def _check_batch(batch: BatchConfig, world_size: int, report: Report) -> BatchPlan | None:
    """The plan of the global batch, or None where there is none."""
    ranks = ("resources.nodes", "resources.tasks_per_node")
    if not report.usable("train.batch", *ranks) or world_size < 1:
        return None
    if any(value is not None and value < 1 for value in (batch.per_rank, batch.global_size, batch.accumulate)):
        return None
    try:
        return batch_plan(batch, world_size)
    except ConfigError as error:
        _refuse(error, report, *ranks)
        return None


def _check_schedule(config: TrainConfig, plan: BatchPlan | None, report: Report) -> None:
    schedule = config.schedule
    if not 0 <= schedule.min_lr_ratio <= 1:
        report.add("train.schedule.min_lr_ratio", f"{schedule.min_lr_ratio} is out of range", "give 0 to 1")
    if schedule.decay_steps is not None and schedule.decay != "wsd":
        wrong = f"has no effect with decay: {schedule.decay}"
        report.add("train.schedule.decay_steps", wrong, "it is for wsd: set it null", "train.schedule.decay")
    if any(report.fitted.is_bad(path) for path in ("train.schedule", "train.epochs", "train.steps", "train.batch")):
        return
    total = _total_steps(config, plan)
    if total is not None and total < 1:
        assert plan is not None
        wrong = f"{plan.global_size} samples, more than the {DIGITS_TRAINING_SAMPLES} of an epoch, and data.last: drop"
        report.add("train.batch.global", wrong, "no step would be left: give a smaller batch, or data.last: keep")
        return
    try:
        check_schedule(schedule, total or _UNKNOWN_LENGTH)
    except ConfigError as error:
        _refuse(error, report)


def _total_steps(config: TrainConfig, plan: BatchPlan | None) -> int | None:
    """Optimizer steps of the whole run, or None where only the data would tell."""
    if config.steps is not None:
        return config.steps if config.steps >= 1 else None
    if config.task != "digits" or plan is None or config.epochs is None or config.epochs < 1:
        return None
    whole, rest = divmod(DIGITS_TRAINING_SAMPLES, plan.global_size)
    return (whole + (1 if rest and config.data.last == "keep" else 0)) * config.epochs


def _refuse(error: ConfigError, report: Report, *involved: str) -> None:
    """A refusal of the training package, `field: what is wrong; what is right`, as a fault of that field."""
    path, _, text = str(error).partition(": ")
    wrong, separator, right = text.rpartition("; ")
    if not separator:
        wrong, right = ("not given", text) if text.startswith("give") else (text, "change one of these numbers")
    report.add(path, wrong, right, *involved)
