"""One rank: its place, its environment, its payload, and a certain end.

`RankJob` is what travels to a node: a run folder's path and nothing else.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.leaving import leave, leave_later
from training.runfolder import ATTEMPT_VARIABLE, RUN_FOLDER_VARIABLE, AttemptFolder, RunFolder, read_json, write_json

from . import finish, payload, rendezvous
from .errors import JOB_FAILED
from .muster import Muster, RendezvousError
from .runspec import load_spec
from .spec import JobSpec

PEER_GRACE_S = 10.0
"""After another rank was lost, how long this one may take to fail by itself before it is made to leave."""
MAX_TEXT = 8000
LOST = "RankLost"


@dataclass(frozen=True)
class RankJob:
    """What srun's tasks run."""

    run_folder: str

    def __call__(self) -> None:
        """Run this task's rank and leave the process with its exit code, unless that is 0."""
        folder = RunFolder(Path(self.run_folder))
        attempt = folder.attempt(int(os.environ[ATTEMPT_VARIABLE]))
        try:
            place = rendezvous.from_slurm(os.environ)
        except ValueError as error:
            print(f"launch: {error}", file=sys.stderr)
            leave(JOB_FAILED)
        if place.rank == 0:
            finish.close_earlier(folder, attempt)
        code = run_rank(folder, attempt, place)
        if code != 0:
            leave(code)
        leave_later(0)


def run_rank(folder: RunFolder, attempt: AttemptFolder, place: rendezvous.Placement) -> int:
    """Meet the other ranks, run the payload, tell how it ended. Returns the exit code; never raises."""
    spec = load_spec(folder)
    run = read_json(folder.run_json)
    try:
        muster = Muster.join(place, run["secret"], attempt.number, spec.rendezvous.timeout_s, say)
    except RendezvousError as error:
        record_failure(attempt, place, "RendezvousError", str(error), None)
        say(str(error))
        return JOB_FAILED
    muster.watch(lambda rank, host, reason: _peer_lost(attempt, place, rank, host, reason))
    interface = spec.rendezvous.interface or muster.interface
    cpus = spec.resources.cpus_per_task
    variables = rendezvous.variables(place, muster.address, muster.port, cpus, interface)
    if spec.command is not None:
        muster.release_port()
    code = guarded(folder, attempt, place, spec, run, variables)
    if code == 0 or not attempt.failure(place.rank).exists():
        muster.goodbye(code)
    else:
        muster.failed(read_json(attempt.failure(place.rank))["text"])
    return code


def guarded(
    folder: RunFolder,
    attempt: AttemptFolder,
    place: rendezvous.Placement,
    spec: JobSpec,
    run: Mapping[str, Any],
    variables: dict[str, str],
) -> int:
    """Set the rank's environment and run the payload; whatever it raises becomes a failure record and an exit code."""
    try:
        enter(folder, attempt, place, spec, run, variables)
        return payload.run(folder, attempt, spec)
    except payload.PayloadError as error:
        leave_later(error.exit_code)
        record_failure(attempt, place, error.kind, str(error), None, error.exit_code)
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:
        return _system_exit(attempt, place, error)
    except BaseException as error:  # noqa: BLE001 - every end of a rank is recorded, then it leaves
        leave_later(JOB_FAILED)
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        record_failure(attempt, place, type(error).__name__, str(error), text)
        return JOB_FAILED


def enter(
    folder: RunFolder,
    attempt: AttemptFolder,
    place: rendezvous.Placement,
    spec: JobSpec,
    run: Mapping[str, Any],
    variables: dict[str, str],
) -> None:
    """Working folder, import path and environment of the payload; the rendezvous variables go to env-<rank>.json."""
    variables[RUN_FOLDER_VARIABLE] = str(folder.path)
    variables[ATTEMPT_VARIABLE] = str(attempt.number)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its C++ side warns of every address without a name
    os.environ.update(variables)
    os.environ.update(spec.env)
    write_json(attempt.environment(place.rank), {"host": socket.gethostname(), "pid": os.getpid(), **variables})
    os.chdir(run["workdir"])
    user_path = [*run["python_path"], run["workdir"]]
    sys.path[:0] = [entry for entry in user_path if entry not in sys.path]


def record_failure(
    attempt: AttemptFolder,
    place: rendezvous.Placement,
    kind: str,
    message: str,
    details: str | None,
    exit_code: int = JOB_FAILED,
    host: str | None = None,
) -> None:
    """Write why a rank failed, unless that was written already: the first reason is the right one."""
    path = attempt.lost(place.rank) if kind == LOST else attempt.failure(place.rank)
    if path.exists():
        return
    text = f"{kind}: {message}" if message else kind
    record = {
        "time": time.time(),
        "rank": place.rank,
        "host": host or socket.gethostname(),
        "exception": kind,
        "message": message[:MAX_TEXT],
        "text": text[:MAX_TEXT],
        "details": None if details is None else details[-MAX_TEXT:],
        "exit_code": exit_code,
    }
    try:
        write_json(path, record)
    except OSError as error:
        say(f"the failure could not be recorded in {attempt.path}: {error}")


def say(text: str) -> None:
    """One line of ours in the rank's log."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _peer_lost(attempt: AttemptFolder, place: rendezvous.Placement, rank: int, host: str, reason: str) -> None:
    """Another rank is gone: this one would wait for it in its next collective, so it has to leave as well."""
    say(f"rank {rank} on {host}: {reason}")
    lost = dataclasses.replace(place, rank=rank)
    record_failure(attempt, lost, LOST, f"{reason} (seen by rank {place.rank})", None, host=host)
    leave_later(JOB_FAILED, PEER_GRACE_S)


def _system_exit(attempt: AttemptFolder, place: rendezvous.Placement, error: SystemExit) -> int:
    if error.code is None or error.code == 0:
        return 0
    code = error.code if isinstance(error.code, int) else 1
    record_failure(attempt, place, "SystemExit", str(error.code), None, code)
    return code
