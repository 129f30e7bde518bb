"""What the terminal says of a job before it runs: its id, where it runs, and the arithmetic of batch and rate."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from training import schedule

from .spec import JobSpec

if TYPE_CHECKING:
    from .submit import Started


def arithmetic(spec: JobSpec) -> list[str]:
    """Batch and learning rate of a `train` job, as rank 0 prints them too; empty for a command."""
    if spec.train is None:
        return []
    plan = schedule.batch_plan(spec.train.batch, spec.resources.nodes * spec.resources.tasks_per_node)
    return schedule.arithmetic_lines(spec.train, plan, spec.train.steps)


def where(spec: JobSpec, run: Started) -> str:
    """The first line after a submission: the run, its folder, its job or its place on this machine."""
    resources = spec.resources
    if run.executor == "local":
        why = "; no sbatch here" if spec.executor == "auto" and not shutil.which("sbatch") else ""
        emulated = f"{resources.nodes} emulated nodes x " if resources.nodes > 1 else ""
        count = resources.tasks_per_node
        place = f"on this machine: {emulated}{count} rank{'s' if count > 1 else ''}{why}"
    else:
        partition = f" on partition {spec.slurm.partition}" if spec.slurm.partition else ""
        place = f"job {run.job_id}{partition}"
    return f"run {run.folder.run_id}  ->  {_shown(run)}   {place}"


def hints(run: Started) -> list[str]:
    """How to look at a job that was submitted, and how to end it."""
    return [f"output: {_shown(run)}/attempts/0001/rank-0000.log", f"to cancel: scancel {run.job_id}"]


def _shown(run: Started) -> str:
    return os.path.relpath(run.folder.path)
