"""Proves that a signal only sets a flag, that a second Ctrl-C interrupts, and that the ranks agree.

pytest tests/training/test_stop.py
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from training.ranks import Ranks
from training.run import process_group
from training.stop import Ahead, StopFlag, agreed, handlers

CPU = torch.device("cpu")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_sets_the_flag_and_the_first_reason_stays(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with handlers(StopFlag()) as stop:
        assert not stop.asked
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.asked, stop.reason) == (True, number.name)
    assert signal.getsignal(number) is before


def test_a_second_interrupt_ends_at_once_also_after_another_signal() -> None:
    with handlers(StopFlag()) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.reason, stop.interrupts) == ("SIGTERM", 1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_alone_the_flag_is_the_answer() -> None:
    stop = StopFlag()
    ahead = Ahead(stop, CPU)
    assert (agreed(stop), ahead.poll()) == (False, False)
    stop.ask("a test")
    assert (agreed(stop), ahead.poll(), stop.reason) == (True, True, "a test")


def _agree(ranks: Ranks) -> tuple[bool, bool, list[bool]]:
    with process_group(ranks, CPU):
        stop = StopFlag()
        before = agreed(stop)
        ahead = Ahead(stop, CPU)
        polls = []
        for turn in range(4):
            if turn == 1 and ranks.rank == 2:
                stop.ask("a test")
            polls.append(ahead.poll())
        ahead.finish()
        return before, agreed(stop), polls


def test_one_rank_that_was_asked_stops_all_at_the_same_round(gang: Callable[..., list[Any]]) -> None:
    assert gang(3, _agree) == [(False, True, [False, False, True, True])] * 3
