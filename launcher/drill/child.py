"""`launch` as a child of the drill: it gets the terminal's signals from here, and ends as it always does."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from training.rehearsal import VARIABLE, Fault, encode

from ..errors import INTERRUPTED, TERMINATED, LaunchError
from ..processes import die_with_parent
from ..script import door_command

POLL_S = 0.2
STOP_WAIT_S = 150.0
"""How long a run may take to stop when it is asked to: longer than its host process gives the ranks."""
KILLED_WAIT_S = 20.0
"""And how long when it is asked again, which kills them."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """Somebody asked the drill to stop, and its child has ended."""


class Interrupts:
    """A context in which Ctrl-C, SIGTERM and a closed terminal are counted, and passed on while a child runs."""

    def __init__(self) -> None:
        self.count = 0
        self.exit_code = INTERRUPTED
        """130 or 143, by the first of them."""

    def __enter__(self) -> Interrupts:
        wanted = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._count) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        if not self.count and number != signal.SIGINT:
            self.exit_code = TERMINATED
        self.count += 1


@dataclass(frozen=True)
class Ended:
    """How a `launch` came to its end."""

    exit_code: int
    wall_s: float


def launch(
    arguments: list[str],
    log: Path,
    record: Path,
    asked: Interrupts,
    faults: Iterable[Fault] = (),
    limit_s: float | None = None,
) -> Ended:
    """Run `launch` with these arguments to its end; what it says goes to `log`.

    `faults`: what it meets, written down in `record`. `limit_s`: the longest that it may take.
    Errors: LaunchError when it takes longer, Interrupted when the drill was asked to stop; it has ended then.
    """
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if faults := list(faults):
        env[VARIABLE] = encode(record, faults)
    if asked.count:
        raise Interrupted
    began = time.monotonic()
    with log.open("ab") as out:
        child = subprocess.Popen(
            door_command("launch", *arguments),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal comes to us alone
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
    late = _minded(child, asked, began, limit_s)
    if asked.count:
        raise Interrupted
    if late:
        raise LaunchError(f"the run did not end within {limit_s:.0f} s, and was stopped; see {log}")
    return Ended(child.returncode, time.monotonic() - began)


def _minded(child: subprocess.Popen[bytes], asked: Interrupts, began: float, limit_s: float | None) -> bool:
    """Wait for the child's end, and ask it to stop when somebody asks, or when it takes too long; whether it did."""
    limits = [] if limit_s is None else [limit_s, limit_s + STOP_WAIT_S, limit_s + STOP_WAIT_S + KILLED_WAIT_S]
    sent = late = 0
    while True:
        try:
            child.wait(POLL_S)
            return late > 0
        except subprocess.TimeoutExpired:
            late = sum(time.monotonic() - began > limit for limit in limits)
        if late == len(limits) > 0:
            child.kill()
        elif max(late, asked.count) > sent:
            sent += 1
            child.send_signal(signal.SIGINT)  # the first lets the ranks save and leave, a second kills them
