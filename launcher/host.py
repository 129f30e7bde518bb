"""A run on this machine: one process imports torch once, forks the ranks of all (emulated) nodes, and watches them.

It stands where Slurm's srun stands on a cluster: it places the ranks, gives each its log, passes stop signals on, and
ends all when one fails.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from training.runfolder import RUN_FOLDER_VARIABLE, AttemptFolder, RunFolder, read_json, write_json

from . import finish, rendezvous, worker
from .errors import DONE, JOB_FAILED, TERMINATED
from .executors import MINDER_VARIABLE, OUTER_GPUS_VARIABLE, SAFE_PATH_VARIABLE
from .gpus import assign
from .processes import die_with_parent, end_marked, end_session, is_running
from .runspec import load_spec
from .spec import JobSpec

FAIL_GRACE_S = 5.0
"""After a rank failed, how long the others may take to say why they failed too, before they are killed."""
STOP_GRACE_S = 120.0
"""After a stop was asked for, how long the ranks may take to save and leave."""
MINDER_POLL_S = 1.0
"""How often the host looks whether `launch`, which shows the run, is still there."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGQUIT)
"""All ask the ranks to save and stop, but for SIGQUIT, which ends them at once."""
_HELD = (signal.SIGCHLD, *_STOP_SIGNALS)
"""Blocked around a fork. SIGCHLD stays so: `_wait` takes it."""


@dataclass(frozen=True)
class HostJob:
    """What submitit's local job runs."""

    run_folder: str

    def __call__(self) -> None:
        """Run one attempt of the run on this machine and write its verdict."""
        folder = RunFolder(Path(self.run_folder))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # `launch` turns Ctrl-C into SIGTERM
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if os.environ.pop(SAFE_PATH_VARIABLE, None):
            os.environ.pop("PYTHONSAFEPATH", None)  # it was for submitit's controller, not for the user's programs
        attempt = folder.take_attempt()
        finish.close_earlier(folder, attempt)
        code = run_attempt(folder, attempt)
        if code != DONE:
            _leave(code)


@dataclass
class _Ranks:
    """The forked ranks that still run, and what was asked of them."""

    places: list[rendezvous.Placement]
    home: Path
    """The attempt's folder."""
    running: dict[int, int] = field(default_factory=dict)
    """pid -> rank."""
    codes: dict[int, int] = field(default_factory=dict)
    """rank -> exit code."""
    stop_signals: int = 0
    looked_at: float = 0.0
    deadline: float | None = None
    killed: bool = False
    """Whether the rest was killed by this process: their ends then say nothing about the cause."""

    def kill(self) -> None:
        self.killed = True
        for pid in list(self.running):
            _signal(os.kill, pid, signal.SIGKILL)  # also before it has a session of its own
            end_session(pid)

    def ask_to_stop(self) -> None:
        for pid in list(self.running):
            _signal(os.kill, pid, signal.SIGTERM)

    def stop_without_minder(self) -> None:
        """Stop when `launch` was killed: nobody would see this run any more, or could end it."""
        if self.stop_signals or time.monotonic() < self.looked_at + MINDER_POLL_S:
            return
        self.looked_at = time.monotonic()
        if not self.home.exists():
            self.kill()  # its folder was removed: what it does now has no place to go
        minder = os.environ.get(MINDER_VARIABLE)
        if minder is not None and not is_running(int(minder)):
            self.on_signal(signal.SIGTERM, None)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_signals += 1
        if number == signal.SIGQUIT:
            self.kill()
            return
        self.deadline = time.monotonic() + STOP_GRACE_S
        self.ask_to_stop()


def run_attempt(folder: RunFolder, attempt: AttemptFolder) -> int:
    """Fork the ranks, wait for them all, write the verdict; returns the attempt's exit code."""
    spec = load_spec(folder)
    started = time.time()
    ranks = _Ranks(rendezvous.emulated(spec.resources.nodes, spec.resources.tasks_per_node), attempt.path)
    for number in _STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks for
            signal.signal(number, ranks.on_signal)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody learns how a child ended
    die_with_parent(signal.SIGTERM)  # without submitit's controller, save and stop
    write_json(attempt.path / "host.json", {"pid": os.getpid(), "started": started})
    if spec.command is None:
        _preload()
    for place in ranks.places:
        if ranks.stop_signals:
            break
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)  # a stop waits until this rank is known
        pid = os.fork()
        if pid == 0:
            _rank(folder, attempt, place, spec)
        ranks.running[pid] = place.rank
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    _wait(ranks, attempt)
    end_marked(f"{RUN_FOLDER_VARIABLE}={folder.path}", spared=(os.getpid(), os.getppid()))  # in sessions of their own
    never_forked = TERMINATED if len(ranks.codes) < len(ranks.places) else DONE
    worst = next((code for code in ranks.codes.values() if code != DONE), never_forked)
    if ranks.stop_signals and worst != DONE and not attempt.stopped.exists():
        write_json(attempt.stopped, {"step": None, "reason": "ended before it could save"})
    return finish.finish(folder, attempt, worst, started=started, job="local").exit_code


def _preload() -> None:
    """Import torch with one thread: a native thread pool would not survive the fork. Ranks set their own number."""
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environ.update(dict.fromkeys(before, "1"))
    from training.preload import preload

    preload()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def _rank(folder: RunFolder, attempt: AttemptFolder, place: rendezvous.Placement, spec: JobSpec) -> NoReturn:
    """In the forked child: become a rank, and leave without the parent's clean-up."""
    code = JOB_FAILED
    try:
        os.setsid()  # where the kernel shares out time by session, each rank gets a share of its own
        die_with_parent()
        for number in (*_STOP_SIGNALS, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
        _redirect(attempt.rank_log(place.rank))
        os.environ.update(_gpu_environment(place, spec, os.environ))
        code = worker.run_rank(folder, attempt, place)
    except BaseException as error:  # noqa: BLE001 - whatever it was, it is told
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr)
        worker.record_failure(attempt, place, type(error).__name__, str(error), text)
    finally:
        _leave(code)


def _leave(code: int) -> NoReturn:
    """Whatever becomes of the last lines: the disk that holds the log may be full."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _gpu_environment(place: rendezvous.Placement, spec: JobSpec, env: Mapping[str, str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": assign(spec.resources, place, env.get(OUTER_GPUS_VARIABLE))}


def _wait(ranks: _Ranks, attempt: AttemptFolder) -> None:
    """Reap ranks until none is left; after the first failure the others get a short time, then SIGKILL."""
    while ranks.running:
        ranks.stop_without_minder()
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks.running:
            rank = ranks.running.pop(pid)
            ranks.codes[rank] = os.waitstatus_to_exitcode(status)
            if ranks.codes[rank] < 0 and not ranks.killed and not ranks.stop_signals:
                name = signal.Signals(-ranks.codes[rank]).name
                why = " (out of memory?)" if name == "SIGKILL" else ""
                worker.record_failure(attempt, ranks.places[rank], "Killed", f"ended by {name}{why}", None)
            elif ranks.codes[rank] > 0 and not ranks.killed and not ranks.stop_signals:
                code, place = ranks.codes[rank], ranks.places[rank]
                worker.record_failure(attempt, place, "Exit", f"left with exit code {code}, and said no reason", None)
            end_session(pid)  # what a dead rank left behind: loaders, a command's children
            if ranks.codes[rank] != DONE and ranks.deadline is None:
                ranks.deadline = time.monotonic() + FAIL_GRACE_S
            continue
        if ranks.deadline is not None and time.monotonic() > ranks.deadline:
            ranks.kill()
        signal.sigtimedwait({signal.SIGCHLD}, MINDER_POLL_S)


def _signal(send: Callable[[int, int], None], pid: int, number: int) -> None:
    try:
        send(pid, number)
    except ProcessLookupError:
        return


def read_host_pid(attempt: AttemptFolder) -> int | None:
    """The host process of a local attempt, or None before it wrote itself down."""
    path = attempt.path / "host.json"
    return int(read_json(path)["pid"]) if path.exists() else None
