"""From a resolved spec to a started job: choose the executor, make the run folder, hand over."""

from __future__ import annotations

import getpass
import os
import platform
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training.runfolder import AttemptFolder, RunFolder, write_json

from . import slurm
from .errors import LaunchError, SubmissionError
from .script import Submission
from .spec import JobSpec
from .specfile import Resolved

_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
"""Of run ids: without letters and digits that are mistaken for each other."""


@dataclass(frozen=True)
class Started:
    """A submitted or started run."""

    folder: RunFolder
    executor: Literal["slurm", "local"]
    job_id: str
    process: subprocess.Popen[bytes] | None = None
    """submitit's controller of a local run."""
    after: int = 0
    """Attempts up to this number are earlier ones."""

    def attempt(self) -> AttemptFolder | None:
        """The attempt to show, once there is one: here the one that was started; of a job, which Slurm may start again,
        the newest."""
        numbers = self.folder.attempt_numbers(self.after)
        return self.folder.attempt(numbers[0 if self.executor == "local" else -1]) if numbers else None


def choose_executor(spec: JobSpec) -> Literal["slurm", "local"]:
    """`auto` is Slurm where sbatch is found, else this machine."""
    if spec.executor == "auto":
        return "slurm" if slurm.available() else "local"
    return spec.executor


def planned(resolved: Resolved, workdir: Path) -> Submission:
    """The submission that a dry run shows: nothing is written, the run id and the token are placeholders."""
    runs = (workdir / resolved.spec.runs).resolve()
    return Submission(RunFolder(runs / f"{resolved.spec.name}-XXXX"), "TOKEN", workdir)


def prepare(resolved: Resolved, workdir: Path) -> Submission:
    """Make the run folder with everything the ranks read.

    Errors: LaunchError when the folder of runs cannot be written.
    """
    runs = (workdir / resolved.spec.runs).resolve()
    try:
        folder = new_folder(runs, resolved.spec.name)
        for inner in (folder.attempts, folder.submitit):
            inner.mkdir(mode=0o700)
        token = secrets.token_hex(8)
        _write(folder.spec, resolved.dump())
        _write(folder.source, resolved.source_text)
        write_json(folder.overrides, resolved.overrides)
        write_json(folder.run_json, _identity(folder, resolved, workdir, token))
    except OSError as error:
        raise _cannot_make(runs, error) from None
    return Submission(folder, token, workdir)


def start_local(resolved: Resolved, submission: Submission) -> Started:
    """Start the prepared run on this machine."""
    from . import executors
    from .host import HostJob

    process = executors.start_local(submission, HostJob(str(submission.folder.path)))
    return Started(submission.folder, "local", str(process.pid), process, submission.after)


def submit_slurm(resolved: Resolved, submission: Submission) -> Started:
    """Hand the prepared run to Slurm.

    Errors: SubmissionError, and the run folder is gone again; SchedulerUnreachable, and it stays with `rejected.json`,
    since a job may have come of it after all.
    """
    from . import executors
    from .worker import RankJob

    folder = submission.folder
    try:
        job_id = executors.submit_slurm(resolved.spec, submission, RankJob(str(folder.path)))
    except SubmissionError:
        if folder.last_attempt() is None:
            shutil.rmtree(folder.path)
        raise
    except LaunchError as error:
        write_json(folder.path / "rejected.json", {"time": time.time(), "error": str(error)})
        raise
    write_json(folder.path / "job.json", {"job_id": job_id, "submitted": time.time()})
    return Started(folder, "slurm", job_id, after=submission.after)


def check_slurm(executor: str) -> None:
    """Errors: SubmissionError when the spec asks for Slurm where there is none."""
    if executor == "slurm" and not slurm.available():
        raise SubmissionError("executor: slurm, but sbatch is not on PATH; use a login node, or executor=local")


def new_folder(runs: Path, name: str) -> RunFolder:
    """An empty folder `NAME-XXXX` among the runs. Errors: LaunchError when it cannot be made."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        while True:
            folder = runs / f"{name}-{''.join(secrets.choice(_ALPHABET) for _ in range(4))}"
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                continue
            return RunFolder(folder)
    except OSError as error:
        raise _cannot_make(runs, error) from None


def _cannot_make(runs: Path, error: OSError) -> LaunchError:
    return LaunchError(
        f"{runs}: the run folder cannot be made: {error.strerror}; give a folder that you may write with runs=PATH"
    )


def _identity(folder: RunFolder, resolved: Resolved, workdir: Path, token: str) -> dict[str, object]:
    spec_folder = Path(resolved.path).resolve().parent
    return {
        "run_id": folder.run_id,
        "token": token,
        "secret": secrets.token_hex(32),
        "created": time.time(),
        "user": getpass.getuser(),
        "host": socket.gethostname(),
        "spec": str(Path(resolved.path).resolve()),
        "workdir": str(workdir),
        "python_path": [str((spec_folder / entry).resolve()) for entry in resolved.spec.python_path],
        "python": platform.python_version(),
        "commit": _commit(workdir),
    }


def _commit(workdir: Path) -> str | None:
    """The commit of the user's working folder, read from .git without starting git; None where there is none."""
    for folder in (workdir, *workdir.parents):
        head = folder / ".git" / "HEAD"
        if not head.is_file():
            continue
        text = head.read_text(encoding="utf-8", errors="replace").strip()
        if not text.startswith("ref: "):
            return text
        ref = folder / ".git" / text.removeprefix("ref: ")
        return ref.read_text(encoding="utf-8").strip() if ref.is_file() else None
    return None


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as out:
        out.write(text)
