"""Errors of the training package that a user can act on: each is shown as its message alone, without a traceback.

TrainingError
├── ConfigError       the spec cannot be trained: the message names the field, the value, the rule and the remedy
│   └── DeviceError   this rank has no device of its own, whatever the others have
├── DataError         data is missing or empty
├── CheckpointError   a checkpoint cannot be written, or none that is needed can be read
├── NotFinite         the loss or a gradient was not a number; names the step and the rank
├── ReplicaError      ranks hold different parameters; names them and their hosts
└── Superseded        a newer attempt of the run has begun, so this one may write nothing more
"""

from __future__ import annotations


class TrainingError(Exception):
    """Something the user can act on."""


class ConfigError(TrainingError):
    """A configuration that cannot be trained."""


class DeviceError(ConfigError):
    """No device for this rank; others may have one, so it has to speak up itself."""


class DataError(TrainingError):
    """Data that is missing, empty or unusable."""


class CheckpointError(TrainingError):
    """A checkpoint that cannot be written or read."""


class NotFinite(TrainingError):
    """A loss or a gradient that is not a finite number. Nothing was saved after it."""

    def __init__(self, step: int, rank: int | None, value: float, host: str = "", what: str = "the loss") -> None:
        """`rank` is None where it is the ranks' common value, such as the sum of their gradients."""
        super().__init__(step, rank, value, host, what)
        self.step, self.rank, self.value, self.host, self.what = step, rank, value, host, what

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.found}; no checkpoint was written after it. "
            "Lower train.optim.base_lr, lengthen train.schedule.warmup_steps or set train.optim.clip_norm, then "
            "resume; or set train.health.not_finite"
        )

    @property
    def found(self) -> str:
        """What was found, and where."""
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.what}{where} is {self.value}" + (f" (host {self.host})" if self.host else "")


class ReplicaError(TrainingError):
    """Ranks whose parameters differ, which data parallel training rules out."""


class Superseded(TrainingError):
    """A newer attempt of the run has begun: from then on it alone writes what both would write."""

    def __init__(self, newer: int) -> None:
        super().__init__(newer)
        self.newer = newer

    def __str__(self) -> str:
        return f"attempt {self.newer} of this run has begun, so this older one saves nothing and ends"
