"""The training loop: data, step, metrics, evaluation, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from .checkpoint import Checkpoints
from .config import RunConfig
from .errors import ConfigError, NotFinite
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
from .schedule import lr_at, scaled_lr
from .step import Stepper
from .stop import StopFlag, agreed
from .task import Task
from .watchdog import Watchdog
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
    pace: Pace
    ledger: Ledger
    metrics: Metrics
    progress: Progress | None
    """On rank 0 only."""
    stop: StopFlag
    health: Health
    replicas: Replicas
    watchdog: Watchdog


def train(job: Job, step: int, samples: int) -> Outcome:
    """Train from `step` steps and `samples` samples on until the run's last step, or until a rank is asked to stop.

    Saves when due, at an agreed stop and at the end. Errors: those of `Stepper.step`, `Replicas.check`
    and `save`.
    """
    config, total = job.config.train, job.total_steps
    peak = scaled_lr(config.optim, job.slots.plan.global_size)
    report, at_once = Report(job, samples), job.health.at_once
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
        report.saves()
        job.watchdog.beat()
        if stopping:
            break
    job.checkpoints.finish()
    report.saves()
    return Outcome("stopped" if stopping else "done", step, samples, results, job.stop.reason if stopping else "")


def save(job: Job, step: int, samples: int, wait: bool) -> None:
    """Begin a save; with `wait`, stay until the checkpoint is durable.

    Errors: those of `Checkpoints.begin` and `Checkpoints.finish`.
    """
    with job.watchdog.slow():
        extra = {"health": job.health.state(), "gradients": job.stepper.order}
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
        job.task, job.model, job.held_out, config.eval.per_rank, config.precision, job.ranks, job.stop, job.watchdog
    )
    if results is not None:
        job.metrics.write({**results, "step": step, "samples": samples, "kind": "eval"})
        if job.config.train.checkpoint.keep_best is not None:
            job.checkpoints.score(step, score(job.config.train.checkpoint.keep_best, results))
        if job.progress is not None:
            shown = "  ".join(f"test {name} {value:.4f}" for name, value in results.items())
            job.progress.note(f"step {step}  {shown}")
    return results


def score(metric: str, results: Mapping[str, float]) -> float:
    """What `train.checkpoint.keep_best` goes by: a result's value, or with a leading minus its negative.

    Errors: ConfigError when there is no such result.
    """
    name = metric.removeprefix("-")
    if name not in results:
        raise ConfigError(
            f"train.checkpoint.keep_best: {metric}: the evaluation has no {name!r}; it has {', '.join(results)}"
        )
    return -results[name] if metric.startswith("-") else results[name]


class Report:
    """Turns readings into metrics and progress, every log.every_steps steps."""

    def __init__(self, job: Job, samples: int) -> None:
        self._metrics, self._progress, self._health = job.metrics, job.progress, job.health
        self._checkpoints, self._pace = job.checkpoints, job.pace
        self._every, self._total = job.config.train.log.every_steps, job.total_steps
        self._epoch_samples = job.slots.epoch_samples
        self._samples, self._since = samples, time.perf_counter()

    def steps(self, readings: list[Reading]) -> bool:
        """Report what is due; whether a stop was agreed."""
        stopping = False
        for reading in readings:
            stopping |= reading.stop
            if reading.fault is not None:
                self._health.note(reading)
            if reading.step % self._every == 0 or reading.step == self._total or reading.stop:
                self._write(reading)
        return stopping

    def saves(self) -> None:
        """Report the saves that ended."""
        for saved in self._checkpoints.poll():
            self._pace.cost_s = saved.stall_s
            if saved.error is not None:
                if self._progress is not None and not isinstance(saved.error, NotFinite):
                    self._progress.note(f"checkpoint: {saved.error}; training goes on")
                continue  # of a spoiled state, the next `begin` or `finish` tells all ranks at once
            facts = {"stall_s": saved.stall_s, "write_s": saved.write_s, "bytes": saved.bytes, "tries": saved.tries}
            self._metrics.write({"step": saved.step, "samples": saved.samples, "kind": "checkpoint", **facts})

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
