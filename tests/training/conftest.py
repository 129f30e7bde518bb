"""Shared by the tests of the training package: real ranks in processes of their own, forked to load torch once."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing as mp
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck

from training.ranks import Ranks

# The machine may be busy: the time that an example takes proves nothing.
hypothesis.settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis.settings.load_profile("steady")

Gang = Callable[..., list[Any]]
_TIMEOUT_S = 60.0


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """No thread pool in this process: a forked rank could wait forever for threads that it did not inherit."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gang() -> Gang:
    """`gang(world_size, function, *arguments)`: call function(ranks, *arguments) on that many ranks; their results.

    The rendezvous variables are set on each. A rank that fails or hangs fails the test with its traceback.
    """
    importlib.import_module("torch._dynamo")  # the first optimizer would import it, in each rank anew
    return _run_gang


def _run_gang(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")
    started: list[tuple[Any, Connection]] = []
    with _forks_allowed():
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(theirs, rank, world_size, port, function, arguments))
            process.start()
            theirs.close()
            started.append((process, ours))
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        answers = [_answer(pipe, deadline) for _, pipe in started]
    finally:
        for process, pipe in started:
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
    assert not failures, "\n".join(failures)
    return [value for _, value in answers]


def _answer(pipe: Connection, deadline: float) -> tuple[bool, Any]:
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            good, value = pipe.recv()
            return bool(good), value
    except EOFError:
        return False, "ended without an answer"
    return False, f"no answer within {_TIMEOUT_S:g} s"


def _rank(
    pipe: Connection, rank: int, world_size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    faulthandler.dump_traceback_later(_TIMEOUT_S - 10)  # shows where a rank hangs
    try:
        pipe.send((True, function(Ranks.from_environment(os.environ), *arguments)))
    except BaseException:  # noqa: BLE001 - whatever it is, the test has to show it
        pipe.send((False, traceback.format_exc()))
        pipe.close()
        os._exit(1)  # other ranks may hang in a collective, so nothing is left in order
    pipe.close()
    os._exit(0)


@contextmanager
def _forks_allowed() -> Iterator[None]:
    """Python 3.12 warns of every fork of a process with threads; ours has none that a rank needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
