"""Errors for users, and the exit codes that they end in.

LaunchError
├── SpecError            2  bad spec or usage; carries every fault found
├── SubmissionError      3  the scheduler said no
├── SchedulerUnreachable 4  the scheduler did not answer
└── RendezvousError      5  the ranks did not find each other
"""

from __future__ import annotations

from dataclasses import dataclass

DONE = 0
BAD_SPEC = 2
REJECTED = 3
UNREACHABLE = 4
JOB_FAILED = 5
DO_NOT_RESTART = 93
INTERRUPTED = 130
TERMINATED = 143


class LaunchError(Exception):
    """Something the user can act on: shown as its message alone, without a traceback."""

    exit_code = JOB_FAILED


@dataclass(frozen=True)
class Fault:
    """One fault of a spec: where it is, which field, what is wrong and what would be right."""

    file: str
    line: int
    """1-based; 0 where the place has no line (an override, a missing field)."""
    column: int
    field: str
    """Dotted path, such as train.optim.name."""
    wrong: str
    right: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.field}: {self.wrong}; {self.right}"


class SpecError(LaunchError):
    """A spec that cannot be launched, with all its faults."""

    exit_code = BAD_SPEC

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = faults


class UsageError(LaunchError):
    """A command line that makes no sense."""

    exit_code = BAD_SPEC


class SubmissionError(LaunchError):
    """The scheduler refused the job."""

    exit_code = REJECTED


class SchedulerUnreachable(LaunchError):
    """The scheduler did not answer in time."""

    exit_code = UNREACHABLE


class RendezvousError(LaunchError):
    """The ranks did not find each other: names the ranks, hosts and ports, and the likely reason."""
