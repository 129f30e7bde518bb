"""When the next checkpoint is due: by steps, by minutes, or by what a save costs and how often runs fail.

Clocks differ between ranks, so rank 0 decides for all. It is asked at few steps only: each time it also names the step
at which it is asked next, half-way to where the save seems due.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable

from .agree import together
from .config import CheckpointConfig
from .ranks import Ranks
from .runfolder import RunFolder

PRIOR_S = 24 * 3600.0
"""Assumed time between failures before any was seen."""
FIRST_LOOK_STEPS = 10
"""Steps whose duration is measured before the first decision."""


def young_daly_s(cost_s: float, between_failures_s: float) -> float:
    """Seconds between saves that lose the least: sqrt(2 C M) for a cost C of a save and a mean time M between failures
    (Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006 adds higher orders)."""
    return math.sqrt(2.0 * cost_s * between_failures_s)


class Pace:
    """Whether a checkpoint is due after a step: the same answer on every rank, which all ask after every step."""

    def __init__(
        self,
        config: CheckpointConfig,
        ranks: Ranks,
        step: int,
        ran_s: float = 0.0,
        failures: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ran_s`, `failures`: seconds that earlier attempts ran, and how many of them failed."""
        self._config, self._ranks, self._clock = config, ranks, clock
        self._timed = config.every_minutes is not None or config.auto
        self._ran_s, self._failures = ran_s, failures
        self._began = self._saved = clock()
        self.periodic = self._timed or config.every_steps is not None
        """Whether saves are due before the end."""
        self._first = step
        self._look = step + FIRST_LOOK_STEPS
        self.cost_s = 0.0
        """What a save cost the training, in seconds, as measured last."""

    def due(self, step: int) -> bool:
        """After `step` steps. A collective at the steps that rank 0 named."""
        if self._config.every_steps is not None and step % self._config.every_steps == 0:
            return True
        if not self._timed or step < self._look:
            return False
        due, self._look = together(self._ranks, "the ranks could not agree on a save", lambda: self._decide(step))[0]
        return due

    def began(self, step: int) -> None:
        """A save began after `step` steps; the time until the next one counts from here."""
        self._saved = self._clock()
        self._look = step + 1

    def interval_s(self) -> float:
        """Seconds between two saves."""
        given = math.inf if self._config.every_minutes is None else 60.0 * self._config.every_minutes
        if not self._config.auto:
            return given
        between = (PRIOR_S + self._ran_s + self._clock() - self._began) / (self._failures + 1)
        return min(given, young_daly_s(max(self.cost_s, 1e-3), between))

    def _decide(self, step: int) -> tuple[bool, int]:
        now = self._clock()
        left = self._saved + self.interval_s() - now
        step_s = max((now - self._began) / (step - self._first), 1e-6)
        steps = left / step_s
        return steps < 0.5, step + max(1, int(min(steps, 1e9) / 2))


class Slowdown:
    """How much longer steps take while a checkpoint is written: from the clock at its begin and end alone."""

    def __init__(self, step: int, now: float) -> None:
        """`now`, here and below: a clock in seconds that stands still in saves and evaluations."""
        self._from = step, now
        self._quiet_s: float | None = None
        """Seconds a step while nothing was written, before the last save."""

    def began(self, step: int, now: float) -> None:
        """A save began after `step` steps."""
        self._quiet_s = self._step_s(step, now)
        self._from = step, now

    def ended(self, step: int, now: float) -> float | None:
        """It has ended. The time of a step meanwhile, by that of one before it; None where none was taken."""
        busy, quiet = self._step_s(step, now), self._quiet_s
        self._from = step, now
        return busy / quiet if busy and quiet else None

    def _step_s(self, step: int, now: float) -> float | None:
        steps = step - self._from[0]
        return (now - self._from[1]) / steps if steps else None


def history(folder: RunFolder) -> tuple[float, int]:
    """Seconds that the run's earlier attempts ran, and how many of them neither ended nor stopped as asked."""
    ran_s, failures = 0.0, 0
    if folder.attempts_jsonl.exists():
        for line in folder.attempts_jsonl.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                attempt = json.loads(line)
                ran_s += max(0.0, float(attempt["end"]) - float(attempt["start"]))
                failures += attempt["cause"] not in ("done", "stopped", "superseded")
            except (ValueError, KeyError, TypeError):
                continue  # half a line that a killed writer left
    return ran_s, failures
