"""Proves that a rank that hangs says where and ends, and that one that is slow, stopped for a while or busy does not.

Each case runs in a process of its own. The limits are seconds, because the machine may be busy.

pytest tests/training/test_watchdog.py
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from training.ranks import Ranks
from training.runfolder import AttemptFolder, read_json
from training.watchdog import EXIT_CODE, Watchdog

pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    path = tmp_path / "0001"
    path.mkdir()
    return AttemptFolder(path)


def started(function: Callable[..., None], *arguments: object) -> mp.process.BaseProcess:
    process = mp.get_context("fork").Process(target=function, args=arguments)  # type: ignore[attr-defined]
    process.start()
    return process  # type: ignore[no-any-return]


def exit_code(process: mp.process.BaseProcess) -> int | None:
    process.join(30)
    if process.is_alive():
        process.kill()
    return process.exitcode


def _stuck_here(attempt: AttemptFolder, rank: int, world_size: int, steps: int) -> None:
    with Watchdog(0.5, attempt, Ranks(rank=rank, world_size=world_size)) as watchdog:
        for _ in range(steps):
            watchdog.beat()
        threading.Event().wait(60)


def test_a_rank_that_hangs_writes_its_stacks_and_why_and_ends(attempt: AttemptFolder) -> None:
    assert exit_code(started(_stuck_here, attempt, 0, 1, 3)) == EXIT_CODE
    stacks = attempt.stacks(0).read_text()
    assert stacks.startswith("rank 0 on ")
    assert "in _stuck_here" in stacks
    (record,) = attempt.failures()
    assert (record["exception"], record["rank"], record["exit_code"]) == ("Hang", 0, EXIT_CODE)
    assert record["text"].startswith("Hang: no step came to its end for ")
    assert f"s (train.health.hang_timeout_s: 0.5); it stands in _stuck_here, {__file__}:" in record["text"]


def test_all_ranks_write_before_the_first_one_leaves_and_one_without_a_word_is_named(attempt: AttemptFolder) -> None:
    ranks = [started(_stuck_here, attempt, rank, 3, 1) for rank in (0, 1)]
    assert [exit_code(process) for process in ranks] == [EXIT_CODE] * 2
    assert [attempt.stacks(rank).exists() for rank in (0, 1, 2)] == [True, True, False]
    for record in attempt.failures():
        assert record["text"].endswith("of rank 2 there is no word: stopped, or in a call that holds the interpreter")


def _alive(attempt: AttemptFolder) -> None:
    """Works for longer than the limit, after a first step and with a save that take longer than it, too."""
    with Watchdog(1.5, attempt, Ranks()) as watchdog:
        time.sleep(2.0)
        for _ in range(40):
            watchdog.beat()
            time.sleep(0.05)
        with watchdog.slow():
            time.sleep(2.0)
        time.sleep(0.1)


def _stopped(attempt: AttemptFolder) -> None:
    with Watchdog(1.0, attempt, Ranks()) as watchdog:
        watchdog.beat()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)
        watchdog.beat()


def test_a_rank_that_is_slow_or_was_suspended_goes_on(attempt: AttemptFolder, tmp_path: Path) -> None:
    other = tmp_path / "0002"
    other.mkdir()
    alive, stopped = started(_alive, attempt), started(_stopped, AttemptFolder(other))
    os.waitid(os.P_PID, stopped.pid or 0, os.WSTOPPED | os.WNOWAIT)
    time.sleep(3.0)  # also the timer in C runs out meanwhile
    os.kill(stopped.pid or 0, signal.SIGCONT)
    assert (exit_code(alive), exit_code(stopped)) == (0, 0)
    assert list(attempt.path.iterdir()) == []
    assert not AttemptFolder(other).failures()


def _holds_the_interpreter(attempt: AttemptFolder) -> None:
    with Watchdog(0.5, attempt, Ranks()) as watchdog:
        watchdog.beat()
        time.sleep(0.2)
        ctypes.PyDLL(None).usleep(3_000_000)


def test_stacks_are_written_even_while_a_call_holds_the_interpreter(attempt: AttemptFolder) -> None:
    assert exit_code(started(_holds_the_interpreter, attempt)) == 0
    assert "in _holds_the_interpreter" in attempt.stacks(0).read_text()


def test_without_a_limit_or_a_folder_nothing_is_left_behind(tmp_path: Path) -> None:
    before = threading.active_count()
    with Watchdog(None, AttemptFolder(tmp_path), Ranks()) as watchdog:
        watchdog.beat()
        assert threading.active_count() == before
    with Watchdog(60, AttemptFolder(tmp_path / "0001"), Ranks()), Watchdog(60, AttemptFolder(tmp_path), Ranks()) as dog:
        dog.beat()
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_the_record_of_a_hang_is_read_like_any_other(attempt: AttemptFolder) -> None:
    assert exit_code(started(_stuck_here, attempt, 0, 1, 0)) == EXIT_CODE
    assert "not even the first step" in read_json(attempt.failure(0))["message"]
