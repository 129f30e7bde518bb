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


def started(spec: JobSpec, run: Started) -> list[str]:
    """The lines after a submission."""
    shown = os.path.relpath(run.folder.path)
    resources = spec.resources
    if run.executor == "local":
        why = "; no sbatch here" if spec.executor == "auto" and not shutil.which("sbatch") else ""
        emulated = f"{resources.nodes} emulated nodes x " if resources.nodes > 1 else ""
        count = resources.tasks_per_node
        where = f"on this machine: {emulated}{count} rank{'s' if count > 1 else ''}{why}"
    else:
        partition = f" on partition {spec.slurm.partition}" if spec.slurm.partition else ""
        where = f"job {run.job_id}{partition}"
    lines = [f"run {run.folder.run_id}  ->  {shown}   {where}", *arithmetic(spec)]
    if run.executor == "slurm":
        lines.append(f"rank 0's output: {shown}/attempts/0001/rank-0000.log   cancel: scancel {run.job_id}")
    return lines
