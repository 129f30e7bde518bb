"""What a dry run prints: the exact script, and each rank's environment. Nothing is written or submitted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Literal

from training.runfolder import ATTEMPT_VARIABLE, RUN_FOLDER_VARIABLE

from . import rendezvous
from .environment import is_outer_job_variable, masked
from .gpus import assign, per_node
from .script import Submission, door_command, rank_command, render
from .spec import JobSpec

ON_SLURM = "set by Slurm when the job starts"


def text(spec: JobSpec, submission: Submission, executor: Literal["slurm", "local"], env: Mapping[str, str]) -> str:
    """The whole dry run. Run id, token, head and port are placeholders: they are chosen when the job starts."""
    run = submission.folder
    lines = [f"dry run: nothing is written or submitted; XXXX in {run.run_id} is drawn at submission", ""]
    if executor == "slurm":
        lines += [f"# sbatch script ({run.submitit}/<job id>_submission.sh)"]
        lines += [render(spec, submission, rank_command(submission))]
    else:
        lines += [_local_line(spec), f"  {shlex.join(door_command('host', str(run.submitit)))}", ""]
    for place in rendezvous.emulated(spec.resources.nodes, spec.resources.tasks_per_node):
        lines += _rank_lines(spec, submission, place, executor, env)
    lines += _inherited(env)
    return "\n".join(lines)


def _local_line(spec: JobSpec) -> str:
    resources = spec.resources
    ranks = f"{resources.nodes} x {resources.tasks_per_node} ranks"
    emulated = " as emulated nodes" if resources.nodes > 1 else ""
    return f"# local: {ranks}{emulated} on this machine, forked by one host process:"


def _rank_lines(
    spec: JobSpec,
    submission: Submission,
    place: rendezvous.Placement,
    executor: Literal["slurm", "local"],
    env: Mapping[str, str],
) -> list[str]:
    head = place.head if executor == "local" else "<first node of the step>"
    variables = rendezvous.variables(place, head, 0, spec.resources.cpus_per_task, spec.rendezvous.interface)
    variables["MASTER_PORT"] = "<free port, another one in each attempt>"
    variables[RUN_FOLDER_VARIABLE] = str(submission.folder.path)
    variables[ATTEMPT_VARIABLE] = "<number of the attempt>"
    if executor == "local":
        variables["CUDA_VISIBLE_DEVICES"] = assign(spec.resources, place, env.get("CUDA_VISIBLE_DEVICES"))
    elif per_node(spec.resources) or "gpu" in (spec.slurm.gres or ""):
        variables["CUDA_VISIBLE_DEVICES"] = f"<{ON_SLURM}>"
    variables |= spec.env
    where = f"node {place.node_rank}" + (" (emulated)" if executor == "local" and spec.resources.nodes > 1 else "")
    return [
        f"# rank {place.rank}, {where}, local rank {place.local_rank}",
        *(f"{name}={_shown(value)}" for name, value in masked(variables).items()),
        "",
    ]


def _shown(value: str) -> str:
    return value if value.startswith("<") and value.endswith(">") else shlex.quote(value)


def _inherited(env: Mapping[str, str]) -> list[str]:
    """Names only: values of a shell's variables are nobody's business in a terminal log."""
    kept = sorted(name for name in env if not is_outer_job_variable(name))
    gone = sorted(name for name in env if is_outer_job_variable(name))
    lines = [f"# inherited from this shell, {len(kept)} variables: {' '.join(kept)}"]
    if gone:
        lines.append(f"# taken out, since they belong to an outer job: {' '.join(gone)}")
    return lines
