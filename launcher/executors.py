"""Our two executors, on submitit's. The only module that imports submitit.

submitit pickles the callable, keeps the job's files and gives a job object; the batch script, the command of a rank and
the way sbatch is called are ours, for the reasons in docs/architecture.md.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import submitit
from submitit.core import utils

from training.runfolder import RUN_FOLDER_VARIABLE

from . import slurm
from .environment import scrub
from .script import Submission, door_command, rank_command, render
from .spec import JobSpec

OUTER_GPUS_VARIABLE = "DDP_OUTER_CUDA_VISIBLE_DEVICES"
"""The GPUs that the user lets this machine's run see: submitit sets CUDA_VISIBLE_DEVICES anew for its local jobs."""
MINDER_VARIABLE = "DDP_LAUNCH_PID"
"""The process that shows a local run: when it is killed, the run saves and stops."""
SAFE_PATH_VARIABLE = "DDP_SAFE_PATH"
"""Says that PYTHONSAFEPATH was set for submitit's controller, which would else import a user's `logging.py`."""
_USER_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_CONSTRAINT": "constraint",
}
"""A user's own defaults for sbatch count where the spec is silent; they would override the script's lines."""
_FOR_EVER_MIN = 60.0 * 24 * 365


class SlurmExecutor(submitit.SlurmExecutor):
    """Submits one run: the script is `script.render`'s, to the letter."""

    def __init__(self, spec: JobSpec, submission: Submission) -> None:
        super().__init__(folder=submission.folder.submitit)
        self._spec, self._submission = spec, submission
        self.update_parameters(nodes=spec.resources.nodes, ntasks_per_node=spec.resources.tasks_per_node)

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join(rank_command(self._submission))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return render(self._spec, self._submission, shlex.split(command))

    def _submit_command(self, command: str) -> submitit.SlurmJob[Any]:
        """As submitit's, but sbatch is called with a time limit and its errors are translated."""
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        script = folder / f".submission_file_{uuid.uuid4().hex}.sh"
        script.write_text(self._make_submission_file_text(command, ""), encoding="utf-8")
        keep = {name for name, field in _USER_DEFAULTS.items() if getattr(self._spec.slurm, field) is None}
        with scrub(keep=keep):
            job_id = slurm.sbatch(script)
        job: submitit.SlurmJob[Any] = submitit.SlurmJob(
            folder=self.folder, job_id=job_id, tasks=list(range(self._num_tasks()))
        )
        job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job


class LocalExecutor(submitit.LocalExecutor):
    """Runs one host process on this machine, which forks the ranks of all (emulated) nodes."""

    def __init__(self, submission: Submission) -> None:
        super().__init__(folder=submission.folder.submitit)
        self._submission = submission
        self.update_parameters(timeout_min=_FOR_EVER_MIN, signal_delay_s=0, stderr_to_stdout=True, tasks_per_node=1)

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join(door_command("host", str(self._submission.folder.submitit)))

    def _submit_command(self, command: str) -> submitit.LocalJob[Any]:
        """As submitit's, but with Ctrl-C blocked in the controller, which would answer it by killing the ranks."""
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        ours = {MINDER_VARIABLE: str(os.getpid()), RUN_FOLDER_VARIABLE: str(self._submission.folder.path)}
        ours |= {} if gpus is None else {OUTER_GPUS_VARIABLE: gpus}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if "PYTHONSAFEPATH" not in os.environ:
            ours |= {"PYTHONSAFEPATH": "1", SAFE_PATH_VARIABLE: "1"}
        outer = {name: os.environ[name] for name in ours if name in os.environ}
        os.environ.update(ours)
        try:
            with scrub():
                return super()._submit_command(command)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for name in ours:
                del os.environ[name]
            os.environ.update(outer)


def submit_slurm(spec: JobSpec, submission: Submission, job: Callable[[], object]) -> str:
    """Submit to Slurm; returns the job id. Errors: SubmissionError, SchedulerUnreachable."""
    return str(SlurmExecutor(spec, submission).submit(job).job_id)


def start_local(submission: Submission, job: Callable[[], object]) -> subprocess.Popen[bytes]:
    """Start the run on this machine; returns submitit's controller, which passes SIGTERM on to the host process."""
    started = LocalExecutor(submission).submit(job)
    assert isinstance(started, submitit.LocalJob) and started._process is not None
    return started._process


def run_pickled(folder: Path) -> None:
    """On a node: run the callable that was pickled at submission. submitit's own signal handlers are replaced by it."""
    from submitit.core.submission import process_job

    process_job(folder)
