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
from training.runfolder import (
    ATTEMPT_VARIABLE,
    RUN_FOLDER_VARIABLE,
    AttemptFolder,
    RunFolder,
    read_json,
    write_failure,
    write_json,
)

from . import finish, payload, rendezvous
from .errors import INTERRUPTED, JOB_FAILED
from .muster import Muster, RendezvousError
from .runspec import load_spec
from .spec import JobSpec

PEER_GRACE_S = 10.0
"""After another rank was lost, how long this one may take to fail by itself before it is made to leave."""
VANISHED_WAIT_S = 1.0
"""How long a rank that fails as if another one had died waits to learn which, before it leaves and knows no more."""
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


@dataclass(frozen=True)
class Rank:
    """One rank and all that it needs to know of its run."""

    folder: RunFolder
    attempt: AttemptFolder
    place: rendezvous.Placement
    spec: JobSpec
    run: Mapping[str, Any]
    """What run.json says."""


def run_rank(folder: RunFolder, attempt: AttemptFolder, place: rendezvous.Placement) -> int:
    """Meet the other ranks, run the payload, tell how it ended. Returns the exit code; never raises."""
    rank = Rank(folder, attempt, place, load_spec(folder), read_json(folder.run_json))
    try:
        muster = Muster.join(place, rank.run["secret"], attempt.number, rank.spec.rendezvous.timeout_s, say)
    except RendezvousError as error:
        record_failure(attempt, place, "RendezvousError", str(error), None)
        say(str(error))
        return JOB_FAILED
    muster.watch(lambda number, host, reason: _peer_lost(rank, number, host, reason))
    interface = rank.spec.rendezvous.interface or muster.interface
    cpus = rank.spec.resources.cpus_per_task
    variables = rendezvous.variables(place, muster.address, muster.port, cpus, interface)
    if rank.spec.command is not None:
        muster.release_port()
    code = guarded(rank, variables)
    if code == 0 and place.rank == 0:
        write_json(attempt.finished, {"time": time.time()})
    if code == 0 or not attempt.failure(place.rank).exists():
        muster.goodbye(code)
    else:
        text = read_json(attempt.failure(place.rank))["text"]
        muster.failed(text, VANISHED_WAIT_S if finish.is_echo(text) else 0.0)
    return code


def guarded(rank: Rank, variables: dict[str, str]) -> int:
    """Set the rank's environment and run the payload; whatever it raises becomes a failure record and an exit code."""
    attempt, place = rank.attempt, rank.place
    try:
        enter(rank, variables)
        return payload.run(rank.folder, attempt, rank.spec)
    except payload.PayloadError as error:
        leave_later(error.exit_code)
        record_failure(attempt, place, error.kind, str(error), None, error.exit_code)
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        record_failure(attempt, place, "KeyboardInterrupt", "this rank alone was interrupted", None, INTERRUPTED)
        return INTERRUPTED
    except SystemExit as error:
        return _system_exit(attempt, place, error)
    except BaseException as error:  # noqa: BLE001 - every end of a rank is recorded, then it leaves
        leave_later(JOB_FAILED)
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        record_failure(attempt, place, type(error).__name__, str(error), text)
        return JOB_FAILED


def enter(rank: Rank, variables: dict[str, str]) -> None:
    """Working folder, import path and environment of the payload; the rendezvous variables go to env-<rank>.json."""
    variables[RUN_FOLDER_VARIABLE] = str(rank.folder.path)
    variables[ATTEMPT_VARIABLE] = str(rank.attempt.number)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its C++ side warns of every address without a name
    os.environ.update(variables)
    os.environ.update(rank.spec.env)
    seen = {"host": socket.gethostname(), "pid": os.getpid(), **variables}
    write_json(rank.attempt.environment(rank.place.rank), seen)
    os.chdir(rank.run["workdir"])
    user_path = [*rank.run["python_path"], rank.run["workdir"], str(Path(rank.run["spec"]).parent)]
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
    try:
        write_failure(path, place.rank, kind, message, exit_code=exit_code, details=details, host=host)
    except OSError as error:
        say(f"the failure could not be recorded in {attempt.path}: {error}")


def say(text: str) -> None:
    """One line of ours in the rank's log."""
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _peer_lost(rank: Rank, number: int, host: str, reason: str) -> None:
    """Another rank is gone: this one would wait for it in its next collective, so it has to leave as well."""
    host = socket.gethostname() if host.startswith("127.") else host  # an emulated node's address
    say(f"rank {number} on {host}: {reason}")
    lost = dataclasses.replace(rank.place, rank=number)
    record_failure(rank.attempt, lost, LOST, f"{reason} (seen by rank {rank.place.rank})", None, host=host)
    leave_later(JOB_FAILED, PEER_GRACE_S)


def _system_exit(attempt: AttemptFolder, place: rendezvous.Placement, error: SystemExit) -> int:
    """A rank that leaves in the middle of a run fails it, whatever code it leaves with: the others still need it."""
    code = error.code if isinstance(error.code, int) and error.code else JOB_FAILED
    leave_later(code)
    record_failure(attempt, place, "SystemExit", str(error.code), None, code)
    return code
