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


def resources(spec: JobSpec) -> str:
    """What the job asks for, in one line: `asks   2 nodes x 2 ranks, 1 CPU each, 4G a node, time 00:30:00`."""
    asked = spec.resources
    nodes, ranks = _count(asked.nodes, "node"), _count(asked.tasks_per_node, "rank")
    parts = [f"{nodes} x {ranks}", f"{_count(asked.cpus_per_task, 'CPU')} each"]
    gpus = {"a rank": asked.gpus_per_task, "a node": asked.gpus_per_node}
    parts += [f"GPUs {value} {unit}" for unit, value in gpus.items() if value]
    memory = {"a node": asked.memory, "a CPU": asked.memory_per_cpu, "a GPU": asked.memory_per_gpu}
    parts += [f"memory {value} {unit}" for unit, value in memory.items() if value is not None]
    parts += [f"{name} {value}" for name, value in (("time", asked.time), ("partition", spec.slurm.partition)) if value]
    return f"asks   {', '.join(parts)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def where(spec: JobSpec, run: Started) -> str:
    """The first line after a submission: the run, its folder, its job or its place on this machine."""
    if run.executor == "local":
        why = "; no sbatch here" if spec.executor == "auto" and not shutil.which("sbatch") else ""
        emulated = f"{spec.resources.nodes} emulated nodes x " if spec.resources.nodes > 1 else ""
        place = f"on this machine: {emulated}{_count(spec.resources.tasks_per_node, 'rank')}{why}"
    else:
        partition = f" on partition {spec.slurm.partition}" if spec.slurm.partition else ""
        place = f"job {run.job_id}{partition}"
    return f"run {run.folder.run_id}  ->  {_shown(run)}   {place}"


def hints(run: Started) -> list[str]:
    """How to look at a job that was submitted, and how to end it."""
    return [f"output: {_shown(run)}/attempts/0001/rank-0000.log", f"to cancel: scancel {run.job_id}"]


def _shown(run: Started) -> str:
    return os.path.relpath(run.folder.path)
