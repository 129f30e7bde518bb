"""What follows when a run is not well: a step that is not finite, replicas that differ.

Whatever is decided here is decided from numbers that all ranks share, so it is the same on each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .checkpoint import Checkpoints
from .config import HealthConfig
from .errors import CheckpointError, NotFinite
from .metrics import Metrics
from .progress import Progress
from .words import Reading


class Health:
    """The policy of `train.health` for steps that are not finite. Its state is kept in each checkpoint.

    A step that is skipped, or undone by a rollback, still counts: its number and its samples are used up. So the data,
    the learning rate and the names of checkpoints stay functions of the step, whatever happened.
    """

    def __init__(
        self, config: HealthConfig, metrics: Metrics, progress: Progress | None, state: Mapping[str, Any]
    ) -> None:
        """`state`: what `state()` gave when the checkpoint was saved from which this run goes on; else empty."""
        self._config, self._metrics, self._progress = config, metrics, progress
        self.skips = int(state.get("skips", 0))
        """Bad steps since the run began, each of which was skipped or led to a rollback."""
        self.rollbacks = [(int(back), int(bad)) for back, bad in state.get("rollbacks", [])]
        """(step whose state came back, step that was bad), in order."""
        self.bad: Reading | None = None
        """For rollback: the bad step that is still to be answered."""

    @property
    def at_once(self) -> bool:
        """Each step's reading has to be waited for: a rollback a step late would be one of another run."""
        return self._config.not_finite == "rollback"

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON."""
        return {"skips": self.skips, "rollbacks": [list(pair) for pair in self.rollbacks]}

    def note(self, reading: Reading) -> None:
        """Take notice of a step with a fault, which changed nothing. A line of the metrics says that it is skipped.

        Errors: the fault, when there were train.health.max_skips of them before.
        """
        assert reading.fault is not None
        if self.skips >= self._config.max_skips:
            several = "s" if self.skips != 1 else ""
            raise _worse(reading.fault, f"after {self.skips} such step{several} (train.health.max_skips), ")
        self.skips += 1
        if self.at_once:
            self.bad = reading
        else:
            self._say(reading, "skip", f"step {reading.step} is skipped: {reading.fault.found}")

    def roll_back(self, checkpoints: Checkpoints, model: nn.Module, optimizer: Optimizer) -> None:
        """Bring back the newest checkpoint that is train.health.rollback_steps older than the bad step. A collective.

        Checkpoints of a stretch that an earlier rollback undid do not count.
        Errors: the fault, when no checkpoint is left for it; CheckpointError when one cannot be read.
        """
        assert self.bad is not None and self.bad.fault is not None
        bad, self.bad = self.bad, None
        assert bad.fault is not None
        with contextlib.suppress(CheckpointError):  # a save that failed was said, and is none to go back to
            checkpoints.finish()
        latest = bad.step - self._config.rollback_steps
        undone = list(self.rollbacks)
        found = checkpoints.newest(lambda step: step <= latest and not any(a < step < b for a, b in undone))
        if found is None:
            raise _worse(bad.fault, f"and there is no checkpoint of step {latest} or before to go back to: ")
        checkpoints.load(found, model, optimizer)
        self.rollbacks.append((found.step, bad.step))
        gone = f"the state of step {found.step} is back, what steps {found.step + 1} to {bad.step} did is gone"
        self._say(bad, "rollback", f"step {bad.step}: {bad.fault.found}; {gone}")

    def _say(self, reading: Reading, event: str, text: str) -> None:
        record = {"step": reading.step, "samples": reading.samples, "kind": "health", "event": event, "text": text}
        self._metrics.write(record)
        if self._progress is not None:
            self._progress.note(f"{text} ({self._config.max_skips - self.skips} more may follow)")


def _worse(fault: NotFinite, why: str) -> NotFinite:
    return NotFinite(fault.step, fault.rank, fault.value, fault.host, why + fault.what)
