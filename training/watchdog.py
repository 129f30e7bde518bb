"""Notices a rank that hangs, writes down where, and ends it: the attempt fails with the cause, not at its time limit.

A thread looks at a counter that every step moves on. It runs also while the main thread waits in a collective or in
any other call that lets go of the interpreter. Where a call holds the interpreter, the thread cannot run: then a timer
in C, set anew at each sign of life, still writes the stacks, and the other ranks, which wait for this one, end the
attempt. The timer ends nothing by itself, because it would also run out for a job that was suspended for a while.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch

from .leaving import leave_later
from .ranks import Ranks
from .runfolder import AttemptFolder, write_failure
from .telling import tell

EXIT_CODE = 94
"""Of a rank that ended itself because it hung."""
SLOW = 3.0
"""The limit is so many times longer for the first step, which may compile, and for a save."""
_PYTHON, _TORCH = (str(Path(module.__file__ or "").parent) + "/" for module in (os, torch))
_WAITS = ("/torch/autograd/", "/torch/distributed/")
"""Where a rank is that waits for others: in the backward pass with its all-reduce, or in another collective."""


class Watchdog:
    """A context that watches this rank. Without a limit it does nothing."""

    def __init__(self, limit_s: float | None, attempt: AttemptFolder, ranks: Ranks) -> None:
        """`limit_s`: seconds without a `beat` that make a hang."""
        self._limit_s, self._attempt, self._ranks = limit_s or 0.0, attempt, ranks
        self._poll_s = min(max(self._limit_s / 20, 0.05), 5.0)
        self._beats = 0
        self._slow = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._stacks: TextIO | None = None

    def __enter__(self) -> Watchdog:
        if self._limit_s:
            with contextlib.suppress(OSError):  # no attempt folder, or a full disk: then standard error has the stacks
                self._stacks = self._attempt.stacks(self._ranks.rank).open("a", encoding="utf-8")
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._stacks is not None:
            self._stacks.close()
            with contextlib.suppress(OSError):
                path = self._attempt.stacks(self._ranks.rank)
                if not path.stat().st_size:
                    path.unlink()

    def beat(self) -> None:
        """A sign of life: a step, an evaluation batch or the like has ended. Costs less than 0.1 us."""
        self._beats += 1

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """What happens inside may take SLOW times the limit."""
        self._slow += 1
        self._beats += 1
        try:
            yield
        finally:
            self._slow -= 1
            self._beats += 1

    def _watch(self) -> None:
        seen, silent_s = -1, 0.0
        last = time.monotonic()
        while True:
            beats, now = self._beats, time.monotonic()
            silent_s += min(now - last, 2 * self._poll_s)  # time in which the whole process was stopped is no silence
            last = now
            limit_s = self._limit_s * (SLOW if self._slow or not beats else 1.0)
            if beats != seen:
                seen, silent_s = beats, 0.0
                self._arm(limit_s)
            elif silent_s >= limit_s or (silent_s >= limit_s / 2 and self._attempt.hang.exists()):
                self._end(silent_s)
            if self._stop.wait(self._poll_s):
                return

    def _arm(self, limit_s: float) -> None:
        """Set the timer in C, which is to run out only where the thread could not speak."""
        stacks = self._stacks or sys.__stderr__
        if stacks is not None:
            faulthandler.dump_traceback_later(limit_s + 2 * self._poll_s + 1.0, file=stacks, repeat=False)

    def _end(self, silent_s: float) -> None:
        """Write everything down, give the other ranks the time to do the same, and leave."""
        grace_s = 2 * self._poll_s + 2.0
        leave_later(EXIT_CODE, grace_s + 10.0)  # the file system may be what hangs
        text = self._text(silent_s)
        tell(f"training: {text}")
        with contextlib.suppress(OSError):
            self._write_down(text, grace_s)
        os._exit(EXIT_CODE)

    def _write_down(self, text: str, grace_s: float) -> None:
        stacks = self._stacks or sys.__stderr__
        if stacks is not None:
            print(f"rank {self._ranks.rank} on {socket.gethostname()}: {text}", file=stacks, flush=True)
            faulthandler.dump_traceback(file=stacks, all_threads=True)
        if self._stacks is None:
            return
        self._attempt.hang.touch()
        own = self._attempt.failure(self._ranks.rank)
        if own.exists():
            return
        write_failure(own, self._ranks.rank, "Hang", text, exit_code=EXIT_CODE)
        missing = self._wait_for_others(grace_s)
        if missing:
            silent = (
                f"{text}; of rank {', '.join(map(str, missing))} there is no word: stopped, or in a call that holds"
            )
            write_failure(own, self._ranks.rank, "Hang", f"{silent} the interpreter", exit_code=EXIT_CODE)

    def _wait_for_others(self, within_s: float) -> list[int]:
        """Ranks that have written no record until then."""
        deadline = time.monotonic() + within_s
        missing = list(range(self._ranks.world_size))
        while missing := [rank for rank in missing if not self._attempt.failure(rank).exists()]:
            if time.monotonic() >= deadline:
                break
            time.sleep(min(0.1, self._poll_s))
        return missing

    def _text(self, silent_s: float) -> str:
        """What happened, worded as an echo where this rank seems to wait for another one."""
        what = "no step" if self._beats else "not even the first step"
        limit = f"{what} came to its end for {silent_s:.0f} s (train.health.hang_timeout_s: {self._limit_s:g})"
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return limit
        if any(part in frame.f_code.co_filename for part in _WAITS):
            return f"{limit}; it timed out where ranks wait for each other, {_place(frame)}"
        return f"{limit}; it stands {_place(frame)}"


def _place(frame: FrameType) -> str:
    """The innermost line of a stack that belongs to neither Python nor torch."""
    inner: FrameType | None = frame
    while inner is not None and inner.f_code.co_filename.startswith((_PYTHON, _TORCH)):
        inner = inner.f_back
    shown = inner or frame
    return f"in {shown.f_code.co_name}, {shown.f_code.co_filename}:{shown.f_lineno}"
