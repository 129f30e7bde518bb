"""A worker process: makes batches for its rank, and puts them into memory that both share.

It is forked, so that nothing of the dataset is pickled or read again and it is there in milliseconds. What another
thread holds at that moment stays locked in it for ever (such as torch's generator, while it draws). So workers are
forked once, when the loader is made, before the rank starts threads of its own, and live as long as it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from .keyed import Read, keyed_reader
from .parcel import Parcel, Slot, pack
from .permute import Indices

Answer = tuple[Parcel, float] | str
"""What a slot holds and the seconds that it took; or what went wrong."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def fork_worker(dataset: Any, ours: Connection, theirs: Connection, slots: list[Slot]) -> int:
    """Start a worker on its end of a pipe, `theirs`; its process id."""
    rank = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else the worker would write out once more what is still in the buffers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on, when there are threads: see above
        pid = os.fork()
    if pid:
        return pid
    try:
        ours.close()
        _serve(dataset, theirs, slots, rank)
    except BaseException:  # noqa: BLE001 - nothing of the rank's own clean-up may run in its copy
        traceback.print_exc()
    finally:
        os._exit(1)


def _serve(dataset: Any, pipe: Connection, slots: list[Slot], rank: int) -> None:
    """A worker's life: until the rank closes the pipe, or is gone.

    A stop is the rank's business: the worker goes on until the rank has ended its step. One thread, because OpenMP's
    other threads were not copied and would be waited for without end. The garbage collector leaves alone what the
    rank had: it would touch, and so copy, all of its memory.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    torch.set_num_threads(1)
    reader = lru_cache(maxsize=2)(lambda seed: keyed_reader(dataset, seed))
    with suppress(EOFError, ConnectionError):  # the rank wants no more
        while os.getppid() == rank:
            answer = _made(reader, slots, *pipe.recv())
            sys.stdout.flush()  # it will be killed, not asked to leave
            pipe.send(answer)


def _made(
    reader: Callable[[int], Read], slots: list[Slot], place: int, seed: int, group: list[tuple[int, int]]
) -> Answer:
    """Make the batches of a group, given as (epoch, samples) each, and put them into the slot."""
    start, whole = time.perf_counter(), sum(count for _, count in group)
    indices = slots[place].view(8 * whole).view(np.int64).copy()
    own = indices

    def made() -> Iterator[Any]:
        nonlocal own
        end = 0
        for epoch, count in group:
            own, end = indices[end : end + count], end + count
            yield reader(seed)(epoch, own)

    try:
        return pack(made(), slots[place]), time.perf_counter() - start
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises is shown on the rank
        return _told(error, own)


def _told(error: Exception, indices: Indices) -> str:
    shown = ", ".join(map(str, indices[:8].tolist()))
    notes = " ".join(getattr(error, "__notes__", []))
    what = notes or f"while a batch of {len(indices)} samples ({shown}{', ...' if len(indices) > 8 else ''}) was made"
    return f"{type(error).__name__}: {error}, {what}\n{''.join(traceback.format_exception(error)).rstrip()}"
