"""What a rank runs: the training package, or any command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import FrameType

from ddp_launcher import step_aside
from training.ranks import Ranks
from training.runfolder import AttemptFolder, RunFolder, write_json

from .errors import BAD_SPEC, JOB_FAILED, TERMINATED
from .processes import die_with_parent
from .spec import JobSpec

_PASSED_ON = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
SIGNAL_SETTLES_S = 0.2
"""How long the signal that ended a command may take to reach this process too, when the scheduler sent it to all."""


class PayloadError(Exception):
    """A payload that ended badly, in words for its user; no traceback is needed."""

    def __init__(self, kind: str, message: str, exit_code: int = JOB_FAILED) -> None:
        super().__init__(message)
        self.kind, self.exit_code = kind, exit_code


def run(folder: RunFolder, attempt: AttemptFolder, spec: JobSpec) -> int:
    """Run the payload in this process's environment; returns its exit code.

    Errors: PayloadError for what its user can act on; anything else as it was raised.
    """
    if spec.command is not None:
        return run_command(attempt, spec.command)
    return run_training(folder, attempt)


def run_training(folder: RunFolder, attempt: AttemptFolder) -> int:
    """Run our loop. A clean stop on a signal ends in 143, a fault in the user's configuration in 2."""
    from training.preload import preload

    preload()
    from training.errors import ConfigError, TrainingError
    from training.run import run as train

    step_aside(sys.path)
    try:
        outcome = train(folder, Ranks.from_environment(os.environ), attempt.number)
    except TrainingError as error:
        code = BAD_SPEC if isinstance(error, ConfigError) else JOB_FAILED
        raise PayloadError(type(error).__name__, str(error), code) from error
    return 0 if outcome.kind == "done" else TERMINATED


def run_command(attempt: AttemptFolder, command: list[str]) -> int:
    """Run any program with this process's environment and pass the stop signals on; returns its exit code.

    No shell is involved: arguments arrive byte for byte. Errors: PayloadError when it cannot start or fails.
    """
    try:
        child = subprocess.Popen(command, preexec_fn=die_with_parent)
    except OSError as error:
        raise PayloadError(type(error).__name__, f"{command[0]}: {error.strerror}: the command cannot start") from None

    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if child.poll() is None:
            child.send_signal(number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    code = child.wait()
    if -code in _PASSED_ON:
        time.sleep(SIGNAL_SETTLES_S)  # sent to all processes of the step: ours may be on its way still
    if code != 0 and asked:
        if os.environ["RANK"] == "0":
            write_json(
                attempt.stopped, {"step": None, "reason": f"{command[0]} ended at {signal.Signals(asked[0]).name}"}
            )
        return TERMINATED
    if code < 0:
        name = signal.Signals(-code).name
        raise PayloadError("Killed", f"{command[0]} was ended by {name}", 128 - code)
    if code != 0:
        raise PayloadError("ExitCode", f"{command[0]} left with exit code {code}", code)
    return 0
