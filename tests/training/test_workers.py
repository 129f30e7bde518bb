"""Proves that worker processes give each batch once and in order, overwrite none, and never outlive or hang their rank.

pytest tests/training/test_workers.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from training import pool as pool_module
from training.errors import DataError
from training.permute import Indices
from training.pool import Pool

WAIT_S = 20.0


def asked(count: int) -> Iterator[tuple[int, Indices]]:
    return ((number // 4, np.arange(number, number + 3)) for number in range(count))


class Made:
    """A dataset whose batches a function makes."""

    def __init__(self, make: Callable[[Indices], Any]) -> None:
        self.fetch = make


def batches(make: Callable[[Indices], Any], asked: Iterable[tuple[int, Indices]], workers: int, prefetch: int) -> Any:
    return Pool(Made(make), workers, prefetch, False).batches(0, asked)


def told(indices: Indices) -> Any:
    return {"values": torch.from_numpy(indices) * 2, "pid": os.getpid()}


@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_batches_come_in_the_order_in_which_they_were_asked_for(workers: int, prefetch: int) -> None:
    found = list(batches(told, asked(11), workers, prefetch))
    assert [b["values"].tolist() for b in found] == [[2 * n, 2 * n + 2, 2 * n + 4] for n in range(11)]
    assert len({b["pid"] for b in found} | {os.getpid()}) == workers + 1


def test_a_batch_that_is_held_is_never_overwritten() -> None:
    held = []
    for batch in batches(told, asked(40), 2, 2):
        held.append(batch["values"])
        batch["values"] += 0  # writable, and its own
    assert [values[0].item() for values in held] == [2 * n for n in range(40)]


def test_no_more_is_asked_for_than_may_be_ahead() -> None:
    taken = []

    def counted() -> Iterator[tuple[int, Indices]]:
        for request in asked(100):
            taken.append(request)
            yield request

    made = batches(told, counted(), 2, 3)
    next(made)
    assert len(taken) == 7
    next(made)
    assert len(taken) <= 9


def test_batches_of_growing_size_and_long_requests_pass() -> None:
    """Far more than a pipe holds, both ways at once."""

    def long(indices: Indices) -> Any:
        return np.repeat(indices, 3), ["x" * 1000] * (len(indices) // 100), os.urandom(len(indices))

    sizes = [10, 100_000, 5, 300_000, 200_000, 7, 250_000, 300_000]
    found = list(batches(long, ((0, np.arange(size)) for size in sizes), 2, 2))
    assert [len(b[0]) for b in found] == [3 * size for size in sizes]
    assert [len(b[2]) for b in found] == sizes and len(found[3][1]) == 3000
    assert all(np.array_equal(b[0][::3], np.arange(size)) for b, size in zip(found, sizes, strict=True))


def test_an_error_names_the_samples_and_shows_where_it_was_raised() -> None:
    def broken(indices: Indices) -> Any:
        if 5 in indices:
            raise KeyError("no such label")
        return indices

    with pytest.raises(DataError) as failed:
        list(batches(broken, asked(9), 2, 2))
    text = str(failed.value)
    assert "KeyError: 'no such label', while a batch of 3 samples (3, 4, 5) was made\n" in text
    assert "in broken" in text and 'raise KeyError("no such label")' in text


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL; was the memory used up?"),
        (lambda: os.kill(os.getpid(), signal.SIGVTALRM), "was killed by SIGVTALRM"),
        (lambda: os._exit(3), "ended with exit code 3"),
    ],
)
def test_a_worker_that_dies_is_named(how: Any, words: str) -> None:
    def deadly(indices: Indices) -> Any:
        if 6 in indices:
            how()
        return indices

    with pytest.raises(DataError, match=r"data worker \d \(process \d+\) " + words.replace("?", r"\?")):
        list(batches(deadly, asked(20), 2, 2))


def test_a_worker_whose_pipe_is_held_open_by_its_own_child_is_missed_all_the_same() -> None:
    def deadly(indices: Indices) -> Any:
        child = os.fork()
        if not child:
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(DataError, match="killed by SIGKILL"):
        list(batches(deadly, asked(1), 1, 1))


def test_workers_ignore_the_signals_that_ask_a_rank_to_stop() -> None:
    def asked_to_stop(indices: Indices) -> Any:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            os.kill(os.getpid(), number)
        return indices

    assert len(list(batches(asked_to_stop, asked(4), 2, 1))) == 4


def test_they_end_with_the_pool_even_in_the_middle_of_a_sample() -> None:
    def slow(indices: Indices) -> Any:
        if 4 in indices:
            time.sleep(600)
        return os.getpid()

    before = len(list(Path("/proc/self/fd").iterdir()))
    pool = Pool(Made(slow), 2, 2, False)
    made = pool.batches(0, asked(20))
    pids = {next(made), next(made)}
    del made, pool
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_second_iterator_gets_nothing_of_the_first() -> None:
    pool = Pool(Made(told), 2, 3, False)
    first = [next(pool.batches(0, asked(30))) for _ in range(3)]
    later = list(pool.batches(0, ((0, np.array([n])) for n in range(100, 110))))
    assert [b["values"][0].item() for b in first] == [0, 0, 0]
    assert [b["values"].tolist() for b in later] == [[2 * n] for n in range(100, 110)]
    assert {b["pid"] for b in first} <= {b["pid"] for b in later}


def run(code: str) -> subprocess.Popen[str]:
    """A rank in a process of its own: native threads and kills have no place in the tests' own."""
    head = """
        import os, threading, time, numpy as np, torch
        from training.pool import Pool
        class Made:
            def fetch(self, indices):
                return make(indices)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )


def test_batches_that_the_rank_makes_sooner_it_makes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes back to workers at once where a trial shows that it does not."""
    monkeypatch.setattr(pool_module, "_FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(pool_module, "_CLEARLY", 10.0**9)
    quick = [b["pid"] for b in batches(told, asked(3000), 2, 2)]
    assert os.getpid() in quick

    def slow_here(indices: Indices) -> Any:
        if os.getpid() == rank:
            time.sleep(0.05)
        return {"pid": os.getpid(), "first": indices[0]}

    rank = os.getpid()
    found = list(batches(slow_here, asked(400), 2, 2))
    assert [b["first"] for b in found] == list(range(400))
    assert 1 <= sum(b["pid"] == rank for b in found) <= 40


def test_workers_do_not_hang_for_what_threads_of_the_rank_do() -> None:
    """OpenMP's threads run when they are forked; later threads hold torch's and numpy's generators at any time."""
    with run("""
        torch.set_num_threads(4)
        product = lambda: (torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()
        product()
        def make(indices):
            return torch.randn(600, 600, generator=torch.Generator()).exp().sum()
        pool = Pool(Made(), 2, 1, False)
        halt = threading.Event()
        def busy():
            while not halt.is_set():
                product(); np.random.rand(1000).tolist()
        threads = [threading.Thread(target=busy) for _ in range(2)]
        [t.start() for t in threads]
        for _ in range(5):
            assert len(list(pool.batches(0, ((0, np.arange(2)) for _ in range(4))))) == 4
        halt.set(); [t.join() for t in threads]
        print("done")
    """) as rank:
        assert rank.communicate(timeout=100)[0] == "done\n"


def test_they_die_with_a_rank_that_is_killed() -> None:
    with run("""
        def make(indices):
            if 5 in indices:
                time.sleep(600)
            return os.getpid()
        made = Pool(Made(), 2, 2, False).batches(0, ((0, np.array([number])) for number in range(8)))
        print(next(made), next(made), flush=True)
        time.sleep(600)
    """) as rank:
        assert rank.stdout is not None
        pids = rank.stdout.readline().split()
        rank.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + WAIT_S
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_a_worker_prints_appears_once(capfd: pytest.CaptureFixture[str]) -> None:
    def loud(indices: Indices) -> Any:
        print(f"made {indices[0]}")
        return None

    print("before")
    list(batches(loud, asked(3), 1, 1))
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "before", "made 0", "made 1", "made 2"]
