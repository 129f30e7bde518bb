"""The batch script of a Slurm job, as a pure function of the spec. A dry run prints exactly what is submitted."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from training.runfolder import ATTEMPT_VARIABLE, RUN_FOLDER_VARIABLE, RunFolder

from . import sbatch_options, units
from .errors import LaunchError
from .spec import JobSpec

DOOR = Path(__file__).resolve().parent.parent / "ddp_launcher.py"
STOP_LEAD_S = 90
"""How long before the time limit the ranks of a `train` job are asked to save and leave."""


@dataclass(frozen=True)
class Submission:
    """What the script needs beside the spec."""

    folder: RunFolder
    token: str
    """Names this submission in squeue and scontrol."""
    workdir: Path
    after: int = 0
    """Number of the run's last attempt before this submission."""


def door_command(*arguments: str) -> list[str]:
    """Our program on a node: the interpreter that runs now, without the current folder on its import path (-P)."""
    return [sys.executable, "-P", "-u", str(DOOR), *arguments]


def rank_command(submission: Submission) -> list[str]:
    """What srun starts once for each rank."""
    return door_command("rank", str(submission.folder.submitit))


def render(spec: JobSpec, submission: Submission, rank_command: list[str]) -> str:
    """The script: options, the site's setup lines, one attempt number, srun, and the attempt's verdict."""
    for path in (submission.folder.path, submission.workdir, Path(sys.executable), DOOR):
        _check_path(path)
    attempts = submission.folder.attempts
    setup = ["", "# setup lines of the spec", *spec.slurm.setup] if spec.slurm.setup else []
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {_option(name, value)}" for name, value in sbatch_arguments(spec, submission)),
        *setup,
        "",
        "# This attempt's number: the first folder that this job creates and nobody else.",
        f"export {RUN_FOLDER_VARIABLE}={shlex.quote(str(submission.folder.path))}",
        f"attempts={shlex.quote(str(attempts))}",
        "number=1",
        'until attempt=$(printf %04d "$number")',
        '    [ ! -e "$attempts/$attempt" ] && mkdir -m 700 "$attempts/$attempt"; do',
        "    number=$((number + 1))",
        '    [ "$number" -le 9999 ] || { echo "no attempt folder can be made in $attempts" >&2; exit 5; }',
        "done",
        f"export {ATTEMPT_VARIABLE}=$number",
        "export SUBMITIT_EXECUTOR=slurm",
        "started=$(date +%s)",
        "",
        _srun(spec, attempts, rank_command),
        "code=$?",
        f'exec {shlex.join(door_command("finish"))} "${RUN_FOLDER_VARIABLE}" "${ATTEMPT_VARIABLE}" "$code" "$started"',
        "",
    ]
    return "\n".join(lines)


def sbatch_arguments(spec: JobSpec, submission: Submission) -> list[tuple[str, str | None]]:
    """Every sbatch option of the job, in order; a value of None is a bare flag."""
    resources, slurm = spec.resources, spec.slurm
    log = f"{submission.folder.attempts}/slurm-%j.log"
    wanted: list[tuple[str, object]] = [
        ("job-name", spec.name),
        ("comment", f"ddp-launcher:{submission.token}"),
        ("nodes", resources.nodes),
        ("ntasks-per-node", resources.tasks_per_node),
        ("cpus-per-task", resources.cpus_per_task),
        ("gpus-per-node", _gpus(resources.gpus_per_node)),
        ("gpus-per-task", _gpus(resources.gpus_per_task)),
        ("gres", slurm.gres),
        ("mem", resources.memory),
        ("mem-per-cpu", resources.memory_per_cpu),
        ("mem-per-gpu", resources.memory_per_gpu),
        ("time", resources.time),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("constraint", slurm.constraint),
        ("nodelist", slurm.nodelist),
        ("exclude", slurm.exclude),
        ("reservation", slurm.reservation),
        ("signal", _stop_signal(spec)),
        ("chdir", str(submission.workdir)),
        ("output", log),
        ("open-mode", "append"),
        ("export", "ALL"),
    ]
    options: list[tuple[str, str | None]] = [(name, str(value)) for name, value in wanted if value is not None]
    options.append(("requeue" if spec.restart.mode == "auto" else "no-requeue", None))
    return options + sbatch_options.normalise(spec.slurm.options)


def _srun(spec: JobSpec, attempts: Path, rank_command: list[str]) -> str:
    """One task a rank; any failing rank ends the step; each rank writes its own log, never truncated."""
    log = shlex.quote(f"{attempts}/") + '"$attempt"' + "/rank-%4t.log"
    words = [
        "srun",
        "--kill-on-bad-exit=1",
        f"--cpus-per-task={spec.resources.cpus_per_task}",
        "--unbuffered",
        "--input=none",
        "--open-mode=append",
        *(shlex.quote(word) for word in spec.slurm.srun_options),
    ]
    return " ".join([*words, f"--output={log}", "\\\n   ", shlex.join(rank_command)])


def _stop_signal(spec: JobSpec) -> str | None:
    """SIGUSR2 ahead of the time limit, for our own loop; a `command` would be killed by a signal it does not expect."""
    if spec.train is None or spec.resources.time is None:
        return None
    limit_s = units.time_seconds(spec.resources.time)
    if limit_s is None:
        return None
    return f"USR2@{min(STOP_LEAD_S, int(limit_s) // 4)}"


def _gpus(text: str | None) -> str | None:
    return None if text is None or text.strip() == "0" else text


def _option(name: str, value: str | None) -> str:
    return f"--{name}" if value is None else f"--{name}={sbatch_quote(value)}"


def sbatch_quote(value: str) -> str:
    """Quote a value as sbatch reads `#SBATCH` lines: double quotes, with backslashes before quotes and backslashes."""
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise LaunchError(f"{value!r}: a control character cannot stand in an #SBATCH line")
    if value and all(character.isalnum() or character in "-_./:=,@%+*[]()&|~" for character in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _check_path(path: Path) -> None:
    text = str(path)
    if "\\" in text or "%" in text or any(ord(character) < 32 for character in text):
        raise LaunchError(
            f"{text!r}: Slurm's file patterns take no backslash, percent sign or control character; use another folder"
        )
