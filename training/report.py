"""What a loop tells while it trains: metrics and progress of its steps, and how its saves went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .pace import Slowdown
from .words import Reading

if TYPE_CHECKING:
    from .loop import Job


class Report:
    """Turns readings into metrics and progress, every log.every_steps steps."""

    def __init__(self, job: Job, step: int, samples: int) -> None:
        self._metrics, self._progress, self._health = job.metrics, job.progress, job.health
        self._checkpoints, self._pace = job.checkpoints, job.pace
        self._every, self._total = job.config.train.log.every_steps, job.total_steps
        self._epoch_samples = job.slots.epoch_samples
        self._samples, self._since = samples, time.perf_counter()
        self._paused_s = 0.0
        self._slowdown = Slowdown(step, self._since)

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

    def began_save(self, step: int) -> None:
        """A save began after `step` steps."""
        self._slowdown.began(step, time.perf_counter() - self._paused_s)

    def saves(self, step: int) -> None:
        """Report the saves that ended, as seen after `step` steps."""
        for saved in self._checkpoints.poll():
            slowdown = self._slowdown.ended(step, time.perf_counter() - self._paused_s)
            self._pace.cost_s = saved.stall_s + max(0.0, (slowdown or 1.0) - 1.0) * saved.write_s
            if saved.error is not None:
                if self._progress is not None and not saved.final:
                    self._progress.note(f"checkpoint: {saved.error}; training goes on")
                continue  # what is final, the next `begin` or `finish` tells all ranks at once
            facts = {"stall_s": saved.stall_s, "write_s": saved.write_s, "bytes": saved.bytes, "tries": saved.tries}
            facts |= {} if slowdown is None else {"slowdown": slowdown}
            self._metrics.write({"step": saved.step, "samples": saved.samples, "kind": "checkpoint", **facts})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside the block out of the samples per second."""
        start = time.perf_counter()
        yield
        paused = time.perf_counter() - start
        self._since += paused
        self._paused_s += paused

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
