"""Slurm's commands: each bounded in time, each error translated. No other module runs them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import SchedulerUnreachable, SubmissionError

SUBMIT_TIMEOUT_S = 60
QUERY_TIMEOUT_S = 20
_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|socket timed out|connection refused|communication connection failure"
    r"|zero bytes were transmitted|no route to host|establish (a )?config(uration)? source|not responding",
    re.IGNORECASE,
)
ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)


@dataclass(frozen=True)
class JobState:
    """What the scheduler says of a job."""

    state: str
    """PENDING, RUNNING, COMPLETED...; UNKNOWN when the scheduler has forgotten the job."""
    reason: str = ""
    nodes: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def available() -> bool:
    """Whether this machine can submit."""
    return shutil.which("sbatch") is not None


def sbatch(script: Path) -> str:
    """Submit a script; returns the job id.

    Errors: SubmissionError when Slurm says no, SchedulerUnreachable when it does not answer.
    """
    done = _run(["sbatch", "--parsable", str(script)], SUBMIT_TIMEOUT_S)
    if done.returncode != 0:
        raise _refusal(done.stderr)
    job_id = done.stdout.strip().splitlines()[-1].split(";")[0] if done.stdout.strip() else ""
    if not job_id.isdigit():
        raise SubmissionError(f"sbatch answered {done.stdout.strip()!r}, which holds no job id")
    return job_id


def job_state(job_id: str) -> JobState:
    """The job's state by squeue, then by sacct where accounting runs.

    Errors: SchedulerUnreachable.
    """
    done = _run(["squeue", "--noheader", "--jobs", job_id, "--states=all", "--format=%T|%r|%N"], QUERY_TIMEOUT_S)
    if done.returncode == 0 and done.stdout.strip():
        state, reason, nodes = (done.stdout.strip().splitlines()[0] + "||").split("|")[:3]
        return JobState(state, reason, nodes)
    if done.returncode != 0 and _UNREACHABLE.search(done.stderr):
        raise SchedulerUnreachable(f"squeue: {done.stderr.strip()}")
    return _accounted_state(job_id)


def requeue(job_id: str) -> None:
    """Put a job back into the queue, under the same id. Errors: SubmissionError, SchedulerUnreachable."""
    done = _run(["scontrol", "requeue", job_id], QUERY_TIMEOUT_S)
    if done.returncode != 0:
        raise SubmissionError(f"scontrol requeue {job_id}: {done.stderr.strip()}")


def _accounted_state(job_id: str) -> JobState:
    if shutil.which("sacct") is None:
        return JobState("UNKNOWN")
    arguments = ["sacct", "--noheader", "--parsable2", "--allocations", "--jobs", job_id, "--format=State,NodeList"]
    done = _run(arguments, QUERY_TIMEOUT_S)
    if done.returncode != 0 or not done.stdout.strip():
        return JobState("UNKNOWN")
    state, _, nodes = done.stdout.strip().splitlines()[-1].partition("|")
    return JobState(state.split()[0], nodes=nodes)  # "CANCELLED by 1000" is CANCELLED


def _refusal(stderr: str) -> SubmissionError | SchedulerUnreachable:
    text = "\n".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in stderr.strip().splitlines())
    if _UNREACHABLE.search(stderr):
        return SchedulerUnreachable(
            f"Slurm does not answer: {text}; nothing was submitted. Try again when it is back, set SLURM_CONF to its "
            "slurm.conf if this shell lacks it, or stay on this machine with executor=local"
        )
    return SubmissionError(f"Slurm refused the job: {text}; nothing was submitted")


def _run(arguments: list[str], timeout_s: int) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        raise SubmissionError(
            f"{arguments[0]} is not on PATH: run on a login node, or with executor=local to stay on this machine"
        ) from None
    except subprocess.TimeoutExpired:
        raise SchedulerUnreachable(
            f"{arguments[0]} gave no answer within {timeout_s} s; look with `squeue --me` before trying again"
        ) from None
