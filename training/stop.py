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
