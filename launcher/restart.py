"""What follows an attempt that stopped cleanly on a cluster: Slurm is asked to start the job again.

Slurm requeues a job that it had to kill, but not one that saved and left in time.
"""

from __future__ import annotations

import json
import sys

from training.runfolder import RunFolder

from . import slurm
from .errors import LaunchError
from .runspec import load_spec

MAX_WITHOUT_PROGRESS = 3
"""Attempts in a row that end at the same step before the run is left alone."""


def after(folder: RunFolder, cause: str, job: str) -> None:
    """Requeue the job after a clean stop, unless the spec, the user or a lack of progress speaks against it."""
    if cause != "stopped" or load_spec(folder).restart.mode == "none":
        return
    if _stuck(folder):
        _say(f"{MAX_WITHOUT_PROGRESS} attempts ended without a new step: the job is not started again")
        return
    try:
        state = slurm.job_state(job).state
        if state != "RUNNING":  # a job that its user cancelled is COMPLETING by now
            _say(f"job {job} is {state.lower()}: it is not started again")
            return
        slurm.requeue(job)
    except LaunchError as error:
        _say(f"the job could not be requeued: {error}")
        return
    _say(f"job {job} is requeued, and goes on from its newest checkpoint")


def _stuck(folder: RunFolder) -> bool:
    lines = folder.attempts_jsonl.read_text(encoding="utf-8").splitlines()[-MAX_WITHOUT_PROGRESS - 1 :]
    steps = [json.loads(line)["last_step"] for line in lines]
    return len(steps) > MAX_WITHOUT_PROGRESS and len(set(steps)) == 1


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
