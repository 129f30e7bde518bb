"""The training loop: data, step, metrics, evaluation, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from .checkpoint import Checkpoints
from .config import RunConfig
from .evaluate import evaluate
from .loader import Loader
from .metrics import Metrics
from .order import Slots
from .progress import Progress
from .ranks import Ranks
from .schedule import lr_at, scaled_lr
from .step import Stepper
from .stop import StopFlag, agreed
from .task import Task
from .words import Reading


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
    metrics: Metrics
    progress: Progress | None
    """On rank 0 only."""
    stop: StopFlag


def train(job: Job, step: int, samples: int) -> Outcome:
    """Train from `step` steps and `samples` samples on until the run's last step, or until a rank is asked to stop.

    Saves when due, at an agreed stop and at the end. Errors: those of `Stepper.step` and of `Checkpoints.save`.
    """
    config, total = job.config.train, job.total_steps
    peak = scaled_lr(config.optim, job.slots.plan.global_size)
    report = Report(job, samples)
    results: dict[str, float] = {}
    if agreed(job.stop):
        return Outcome("stopped", step, samples, results, job.stop.reason)
    for data in job.loader.steps(job.slots, samples, total - step):
        step, samples = step + 1, data.samples
        last = step == total
        save_due = _due(step, config.checkpoint.every_steps) or (last and config.checkpoint.at_end)
        evaluation_due = _due(step, config.eval.every_steps) or (last and config.eval.at_end)

        lr = lr_at(step - 1, peak, config.schedule, total)
        readings = job.stepper.step(step, data, lr, job.stop.asked, now=save_due or evaluation_due or last)
        stopping = report.steps(readings)

        if save_due or stopping:
            report.steps(job.stepper.flush())  # no state is saved before its loss is known to be a number
            with report.paused():
                job.checkpoints.save(step, samples, job.model, job.optimizer, job.config)
                stopping = agreed(job.stop) or stopping
        if evaluation_due and not stopping:
            with report.paused():
                measured = run_evaluation(job, step, samples)
                if measured is None:
                    stopping = True
                    if not save_due:
                        job.checkpoints.save(step, samples, job.model, job.optimizer, job.config)
            results = measured or results
        if stopping:
            return Outcome("stopped", step, samples, results, job.stop.reason)
    return Outcome("done", step, samples, results)


def run_evaluation(job: Job, step: int, samples: int) -> dict[str, float] | None:
    """Evaluate, write and show the result. None when a stop was agreed meanwhile; empty without held-out data."""
    if job.held_out is None:
        return {}
    config = job.config.train
    results = evaluate(job.task, job.model, job.held_out, config.eval.per_rank, config.precision, job.ranks, job.stop)
    if results is not None:
        job.metrics.write({**results, "step": step, "samples": samples, "kind": "eval"})
        if job.progress is not None:
            shown = "  ".join(f"test {name} {value:.4f}" for name, value in results.items())
            job.progress.note(f"step {step}  {shown}")
    return results


class Report:
    """Turns readings into metrics and progress, every log.every_steps steps."""

    def __init__(self, job: Job, samples: int) -> None:
        self._metrics, self._progress = job.metrics, job.progress
        self._every, self._total = job.config.train.log.every_steps, job.total_steps
        self._epoch_samples = job.slots.epoch_samples
        self._samples, self._since = samples, time.perf_counter()

    def steps(self, readings: list[Reading]) -> bool:
        """Report what is due; whether a stop was agreed."""
        stopping = False
        for reading in readings:
            stopping |= reading.stop
            if reading.step % self._every == 0 or reading.step == self._total or reading.stop:
                self._write(reading)
        return stopping

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside the block out of the samples per second."""
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start

    def _write(self, reading: Reading) -> None:
        now = time.perf_counter()
        record: dict[str, float | int | str] = {
            "step": reading.step,
            "samples": reading.samples,
            "kind": "train",
            "loss": reading.loss,
            "lr": reading.lr,
            "epoch": reading.samples / self._epoch_samples,
        }
        rate = (reading.samples - self._samples) / max(now - self._since, 1e-9)
        self._samples, self._since = reading.samples, now
        self._metrics.write({**record, "samples_per_s": rate})
        if self._progress is not None:
            self._progress.update(reading.step, reading.loss, reading.lr, rate)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
