"""Asking a run to stop. A signal handler only sets a flag; the ranks then agree on the step at which they stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


@dataclass
class StopFlag:
    """Whether, and why, this process was asked to stop."""

    asked: bool = False
    reason: str = ""
    """Name of the first signal, or the words of whoever asked."""
    interrupts: int = 0
    """SIGINTs received."""

    def ask(self, reason: str) -> None:
        """Ask for a stop; the first reason stays."""
        if not self.asked:
            self.reason = reason
            self.asked = True

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler. Errors: KeyboardInterrupt at the second SIGINT."""
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number).name)


@contextmanager
def handlers(stop: StopFlag) -> Iterator[StopFlag]:
    """Let SIGTERM, SIGUSR2 and SIGINT set the flag inside the block. Main thread only; earlier handlers come back."""
    before = {number: signal.signal(number, stop.handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def agreed(stop: StopFlag) -> bool:
    """Whether any rank was asked to stop: the same answer on all. A collective when a process group exists."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return stop.asked
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    word = torch.tensor(int(stop.asked), dtype=torch.int32, device=device)
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return bool(word.item())


class Ahead:
    """Agreement inside a loop without a collective of its own, such as evaluation: it is read one round late.

    Each `poll` returns what was agreed in the round before and starts this round's MAX all-reduce, which then runs
    beside the round's work. Every rank must poll equally often.
    """

    def __init__(self, stop: StopFlag, device: torch.device) -> None:
        self._stop = stop
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._word = torch.zeros((), dtype=torch.int32, device=device)
        self._work: dist.Work | None = None

    def poll(self) -> bool:
        """Whether any rank had been asked to stop when the round before began."""
        if self._alone:
            return self._stop.asked
        asked = self.finish()
        self._word.fill_(int(self._stop.asked))
        self._work = dist.all_reduce(self._word, op=dist.ReduceOp.MAX, async_op=True)
        return asked

    def finish(self) -> bool:
        """Wait for the round under way and return what it agreed on."""
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._word.item())
