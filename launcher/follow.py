"""Watching a run from the terminal: rank 0's log as it grows, a progress bar, and the verdict at the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from signal import SIGHUP, SIGINT, SIGTERM
from types import FrameType

from training.runfolder import RUN_FOLDER_VARIABLE, AttemptFolder, RunFolder

from . import finish, slurm
from .errors import DONE, INTERRUPTED, JOB_FAILED, TERMINATED, SchedulerUnreachable
from .host import read_host_pid
from .processes import end_marked, is_running
from .screen import Screen, Tail, tell
from .submit import Started

POLL_S = 0.1
QUERY_S = 2.0
VERDICT_WAIT_S = 10.0
"""How long after the scheduler says that a job ended its verdict may take to show on a shared file system."""
FORGOTTEN_S = 20.0
"""How long neither squeue nor sacct may know a job before it counts as over: accounting lags behind."""
UNREACHABLE_LIMIT_S = 600.0


class Interrupts:
    """Ctrl-C, SIGTERM and a closed terminal while `launch` minds a local run, from before its start to its end.

    They are counted in the handler and passed on by the loop once the host process can take them.
    """

    def __init__(self) -> None:
        self.exit_code = DONE
        """130 or 143 once the user asked to stop."""
        self._asked = self._passed_on = 0
        self._host: int | None = None

    def __enter__(self) -> Interrupts:
        wanted = [number for number in (SIGINT, SIGTERM, SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._count) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1
        self.exit_code = INTERRUPTED if number == SIGINT else TERMINATED

    def pass_on(self, started: Started, screen: Screen) -> None:
        """SIGTERM to the host for the first, SIGQUIT for the second."""
        if self._host is None:
            attempt = started.attempt()
            self._host = read_host_pid(attempt) if attempt else None
        if self._host is None or self._passed_on >= min(self._asked, 2):
            return
        self._passed_on += 1
        if self._passed_on == 1:
            screen.clear()
            tell("\nlaunch: stopping cleanly; Ctrl-C again ends the ranks at once")
        with suppress(ProcessLookupError):
            os.kill(self._host, SIGTERM if self._passed_on == 1 else signal.SIGQUIT)

    def host_is_running(self) -> bool:
        """Whether the host process is still there, even without submitit's controller."""
        return self._host is not None and is_running(self._host)


def follow_local(started: Started, screen: Screen, asked: Interrupts) -> int:
    """Show a local run until it ends; returns its exit code.

    Ctrl-C asks the ranks to save and stop; a second one ends them at once.
    """
    folder, process = started.folder, started.process
    assert process is not None

    def ended() -> bool:
        asked.pass_on(started, screen)
        return process.poll() is not None and not asked.host_is_running()

    _show_until(started, ended, screen)
    attempt = started.attempt() if folder.path.exists() else None
    if attempt is None:
        _print_controller_log(folder)
        return asked.exit_code or JOB_FAILED
    verdict = _verdict(attempt)
    if verdict is None:
        _end_orphans(folder)
        verdict = finish.close(folder, attempt)
    _say(verdict)
    return asked.exit_code or verdict.exit_code if verdict.exit_code != DONE else DONE


def _end_orphans(folder: RunFolder) -> None:
    """After the host process was killed: end what its ranks left, known by the run's folder in their environment."""
    end_marked(f"{RUN_FOLDER_VARIABLE}={folder.path}")


def follow_slurm(started: Started, screen: Screen) -> int:
    """Show a Slurm job until it ends; returns its exit code. Ctrl-C stops the showing, not the job."""
    folder, job_id = started.folder, started.job_id
    watch = _SlurmWatch(job_id, screen)
    try:
        _show_until(started, watch.ended, screen)
    except KeyboardInterrupt:
        screen.clear()
        tell(f"\nlaunch: job {job_id} goes on; scancel {job_id} ends it")
        return INTERRUPTED
    deadline = time.monotonic() + VERDICT_WAIT_S
    attempt = started.attempt()
    while (verdict := _verdict(attempt)) is None and watch.state != "CANCELLED" and time.monotonic() < deadline:
        time.sleep(POLL_S)
        attempt = started.attempt()
    if verdict is None and watch.state == "CANCELLED":
        tell(f"launch: job {job_id} was cancelled")
        return TERMINATED
    if verdict is None:
        tell(f"launch: job {job_id} ended as {watch.state}; see {folder.attempts}")
        return JOB_FAILED
    _say(verdict)
    return verdict.exit_code


@dataclass
class _SlurmWatch:
    """Asks the scheduler now and then, says what changed, and bears with a controller that is away for a while."""

    job_id: str
    screen: Screen
    state: str = ""
    _next: float = 0.0
    _answered: float = field(default_factory=time.monotonic)

    def ended(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + QUERY_S
        try:
            job = slurm.job_state(self.job_id)
        except SchedulerUnreachable:
            if time.monotonic() - self._answered > UNREACHABLE_LIMIT_S:
                raise
            return False
        if job.state == "UNKNOWN" and time.monotonic() - self._answered < FORGOTTEN_S:
            return False
        self._answered = time.monotonic()
        if job.state != self.state:
            self.state = job.state
            reason = f" ({job.reason})" if job.state == "PENDING" and job.reason not in ("", "None") else ""
            nodes = f" on {job.nodes}" if job.nodes and not job.ended else ""
            self.screen.clear()
            self.screen.line(f"job {self.job_id} {job.state.lower()}{reason}{nodes}")
        return job.ended or job.state == "UNKNOWN"


def _show_until(started: Started, ended: Callable[[], bool], screen: Screen) -> None:
    """Copy rank 0's log of the newest attempt to the screen until the run has ended and all is shown."""
    tail: Tail | None = None
    over = False
    while not over:
        over = ended()
        attempt = started.attempt()
        if attempt is not None and (tail is None or tail.path != attempt.rank_log(0)):
            tail = Tail(attempt.rank_log(0))
        for line in tail.lines() if tail else []:
            screen.line(line)
        if not over:
            time.sleep(POLL_S)
    for line in tail.remainder() if tail else []:
        screen.line(line)
    screen.clear()


def _verdict(attempt: AttemptFolder | None) -> finish.Verdict | None:
    return finish.read_verdict(attempt) if attempt else None


def _say(verdict: finish.Verdict) -> None:
    for text in verdict.lines():
        tell(f"launch: {text}")


def _print_controller_log(folder: RunFolder) -> None:
    """What the host process said when it never came to an attempt."""
    for log in sorted(folder.submitit.glob("*_log.*")):
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        if text:
            tell(f"launch: the run did not start; {log}:\n{text[-4000:]}")
            return
    tell(f"launch: the run ended without a word; was {folder.path} removed, or its disk full?")
