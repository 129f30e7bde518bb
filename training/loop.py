"""The training loop: data, step, metrics, evaluation, checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .checkpoint import Checkpoints
from .config import RunConfig
from .evaluate import evaluate
from .health import Health
from .ledger import Ledger
from .loader import Loader
from .metrics import Metrics
from .order import Slots
from .pace import Pace
from .progress import Progress
from .ranks import Ranks
from .replicas import Replicas
from .report import Report
from .schedule import lr_at, scaled_lr
from .step import Stepper
from .stop import StopFlag, agreed
from .task import Task
from .watchdog import Watchdog


@dataclass
class Outcome:
    """How a run, or an attempt of it, ended without an error."""

    kind: Literal["done", "stopped"]
    step: int
    """Optimizer steps done since the run began."""
    samples: int
    """Samples consumed by all ranks since the run began."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last evaluation's means; empty when there was none."""
    reason: str = ""
    """For `stopped`: what asked this rank to stop (a signal's name); empty on ranks that only agreed."""


@dataclass
class Job:
    """Everything that the loop joins, built by `run`."""

    config: RunConfig
    ranks: Ranks
    task: Task
    model: torch.nn.Module
    """The bare model, not DDP's wrapper."""
    optimizer: torch.optim.Optimizer
    stepper: Stepper
    loader: Loader
    slots: Slots
    held_out: Loader | None
    """Evaluation data; None when the task has none."""
    total_steps: int
    checkpoints: Checkpoints
    pace: Pace
    ledger: Ledger
    metrics: Metrics
    progress: Progress | None
    """On rank 0 only."""
    stop: StopFlag
    health: Health
    replicas: Replicas
    watchdog: Watchdog
    code: dict[str, Any] = field(default_factory=dict)
    """Of the user's code: the commit of the folder that `launch` was called in, and the hash of the task's file."""


def train(job: Job, step: int, samples: int) -> Outcome:
    """Train from `step` steps and `samples` samples on until the run's last step, or until a rank is asked to stop.

    Saves when due, at an agreed stop and at the end. Errors: those of `Stepper.step`, `Replicas.check`
    and `save`.
    """
    config, total = job.config.train, job.total_steps
    peak = scaled_lr(config.optim, job.slots.plan.global_size)
    report, at_once = Report(job, step, samples), job.health.at_once
    results: dict[str, float] = {}
    stopping = agreed(job.stop)
    if stopping:
        return Outcome("stopped", step, samples, results, job.stop.reason)
    first = step + 1
    for data in job.loader.steps(job.slots, samples, total - step):
        step, samples = step + 1, data.samples
        last = step == total
        save_due = job.pace.due(step) or (last and config.checkpoint.at_end)
        evaluation_due = _due(step, config.eval.every_steps) or (last and config.eval.at_end)

        lr = lr_at(step - 1, peak, config.schedule, total)
        readings = job.stepper.step(step, data, lr, job.stop.asked, now=save_due or evaluation_due or last or at_once)
        job.ledger.add(data.share)
        stopping = report.steps(readings)
        if job.health.bad is not None:
            with job.watchdog.slow():
                job.health.roll_back(job.checkpoints, job.model, job.optimizer)
        if _due(step, config.health.replica_every_steps):
            job.replicas.check(step)

        if save_due or stopping:
            report.steps(job.stepper.flush())  # no state is saved before its loss is known to be a number
            with report.paused():
                save(job, step, samples, wait=last or stopping)
                stopping = agreed(job.stop) or stopping
            report.began_save(step)
        if evaluation_due and not stopping:
            with report.paused():
                measured = run_evaluation(job, step, samples)
                if measured is None:
                    stopping = True
                    if not save_due:
                        save(job, step, samples, wait=True)
            results = measured or results
        if step == first and job.pace.periodic:
            job.checkpoints.reserve(job.model, job.optimizer)
        report.saves(step)
        job.watchdog.beat()
        if stopping:
            break
    job.checkpoints.finish()
    report.saves(step)
    return Outcome("stopped" if stopping else "done", step, samples, results, job.stop.reason if stopping else "")


def save(job: Job, step: int, samples: int, wait: bool) -> None:
    """Begin a save; with `wait`, stay until the checkpoint is durable.

    Errors: those of `Checkpoints.begin` and `Checkpoints.finish`.
    """
    with job.watchdog.slow():
        extra = {"health": job.health.state(), "gradients": job.stepper.order, "code": job.code}
        job.checkpoints.begin(step, samples, job.model, job.optimizer, job.config, job.ledger.part(), extra)
        job.pace.began(step)
        if wait or not job.config.train.checkpoint.behind:
            job.checkpoints.finish()


def run_evaluation(job: Job, step: int, samples: int) -> dict[str, float] | None:
    """Evaluate, write and show the result. None when a stop was agreed meanwhile; empty without held-out data."""
    if job.held_out is None:
        return {}
    config = job.config.train
    results = evaluate(
        job.task,
        job.model,
        job.held_out,
        config.eval.per_rank,
        config.precision,
        job.ranks,
        job.stop,
        job.watchdog,
        config.reproducible,
    )
    if results is not None:
        job.metrics.write({**results, "step": step, "samples": samples, "kind": "eval"})
        if job.config.train.checkpoint.keep_best is not None:
            value = score(job.config.train.checkpoint.keep_best, results)
            if value is not None:
                job.checkpoints.score(step, value)
            elif job.progress is not None:
                job.progress.note(
                    f"train.checkpoint.keep_best: {job.config.train.checkpoint.keep_best}: no best one is kept, since "
                    f"the evaluation has no such result; it has {', '.join(results)}"
                )
        if job.progress is not None:
            shown = "  ".join(f"test {name} {value:.4f}" for name, value in results.items())
            job.progress.note(f"step {step}  {shown}")
    return results


def score(metric: str, results: Mapping[str, Any]) -> float | None:
    """What `train.checkpoint.keep_best` goes by: a result's value, or with a leading minus its negative.

    None when there is no such result.
    """
    name = metric.removeprefix("-")
    if name not in results:
        return None
    return -float(results[name]) if metric.startswith("-") else float(results[name])


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
