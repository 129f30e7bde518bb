"""Worker processes that make batches, and hand them over through memory that they share with the rank.

Workers are forked, so that nothing of the dataset is pickled or read again and they are there in milliseconds. What
another thread holds at that moment stays locked in them for ever (such as torch's generator, while it draws): so they
are forked once, when the loader is made, before the rank starts threads of its own, and they live as long as it.

Of each worker the rank keeps a pipe, over which requests go and answers come, and `prefetch` slots of memory without a
name, of which nothing can be left behind. A slot is used again when no part of its batches is held any more.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from itertools import cycle, islice
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import torch

from .errors import DataError
from .keyed import Read, keyed_reader
from .parcel import How, Parcel, Slot, pack, unpack
from .permute import Indices

Asked = tuple[int, Indices]
"""An epoch, and samples of it."""
_Answer = tuple[Parcel, float] | str
"""What a slot holds and the seconds that it took; or what went wrong."""

_PR_SET_PDEATHSIG = 1
_LOOK_MS = 1000
_MOST, _QUICK_S, _SMALL = 64, 0.002, 1_000_000
"""A group has at most so many batches, and grows while its worker needs less than these seconds and bytes for it."""
_HELD = 2
"""Slots of a worker that may be held by batches in use, besides those of batches that are under way."""
_libc = ctypes.CDLL(None)


class Pool:
    """`workers` processes, each with `prefetch` groups of batches ahead. They end with the pool or this process."""

    def __init__(self, dataset: Any, workers: int, prefetch: int, pinned: bool) -> None:
        """`pinned`: CPU tensors of batches lie in page-locked memory.

        Errors: TypeError when the dataset cannot be read.
        """
        keyed_reader(dataset, 0)
        self._pinned, self._most = pinned, workers * prefetch
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end, self._workers, os.getpid())
        for number in range(workers):
            self._workers.append(_Worker(dataset, number, prefetch))

    def batches(self, seed: int, asked: Iterable[Asked]) -> Iterator[Any]:
        """One batch for each (epoch, indices), in their order. One such iterator at a time.

        Small batches are asked for and handed over in groups: one costs 50 us on its way, whatever its size.
        Errors: DataError when a sample could not be made, with the worker's traceback, or when a worker died.
        """
        for worker in self._workers:
            worker.forget()
        requests, ahead, count = iter(asked), deque[_Worker](), 1
        turn = cycle(self._workers)
        while group := list(islice(requests, count)):
            worker = next(turn)
            made: list[Any] = []
            if len(ahead) == self._most:
                made, quick = ahead.popleft().receive(self._pinned)
                count = min(2 * count, _MOST) if quick else max(count // 2, 1)
            worker.send(seed, group)
            ahead.append(worker)
            while made:
                yield made.pop()
        while ahead:
            made, _ = ahead.popleft().receive(self._pinned)
            while made:
                yield made.pop()


class _Worker:
    """The rank's side of a worker."""

    def __init__(self, dataset: Any, number: int, prefetch: int) -> None:
        self._number = number
        self._slots = [Slot() for _ in range(prefetch + _HELD)]
        self._free = deque(range(len(self._slots)))
        self._under_way: deque[int] = deque()
        self._pipe, theirs = Pipe()
        self.pid = _fork(dataset, self._pipe, theirs, self._slots)
        theirs.close()
        self._answers = select.poll()
        self._answers.register(self._pipe.fileno(), select.POLLIN)

    def send(self, seed: int, group: list[Asked]) -> None:
        """Ask for batches. All that may be long goes through the slot: were the pipe full, both sides would wait."""
        place = self._free.popleft()
        indices = np.concatenate([own for _, own in group])
        self._slots[place].view(indices.nbytes).view(np.int64)[:] = indices
        try:
            self._pipe.send((place, seed, [(epoch, len(own)) for epoch, own in group]))
        except ConnectionError:
            raise self._gone() from None
        self._under_way.append(place)

    def receive(self, pinned: bool) -> tuple[list[Any], bool]:
        """The next batches that it was asked for, the first one last, and whether twice as many would still be quick.

        They stay in the slot, and the slot is used again when nothing of them is left. Whoever holds on to batches
        gets copies, as soon as slots run short.
        """
        place, answer = self._under_way.popleft(), self._answer()
        if isinstance(answer, str):
            self._free.append(place)
            raise DataError(f"data worker {self._number}: {answer}")
        parcel, seconds = answer
        how: How = "pin" if pinned else "view" if self._free else "copy"
        made = unpack(parcel, self._slots[place], how, partial(self._free.append, place))
        return made[::-1], seconds < _QUICK_S and parcel.size < _SMALL

    def forget(self) -> None:
        """Drop what an earlier iterator asked for and did not take."""
        while self._under_way:
            self._answer()
            self._free.append(self._under_way.popleft())

    def _answer(self) -> _Answer:
        while not self._answers.poll(_LOOK_MS):
            if self._end_of(os.WNOHANG):  # what it had started itself may still hold its end of the pipe
                raise self._gone()
        try:
            answer: _Answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._gone() from None
        return answer

    def _end_of(self, wait: int) -> str:
        """How the process ended; empty while it runs. It is left to be waited for."""
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | wait)
        except ChildProcessError:
            return "is gone"  # something else in this process has waited for it
        if ended is None:
            return ""
        if ended.si_code == os.CLD_EXITED:
            return f"ended with exit code {ended.si_status}"
        killed = f"was killed by {signal.Signals(ended.si_status).name}"
        if ended.si_status != signal.SIGKILL:
            return killed
        return killed + "; was the memory used up? Ask for more, or lower train.data.workers or train.data.prefetch"

    def _gone(self) -> DataError:
        return DataError(f"data worker {self._number} (process {self.pid}) {self._end_of(wait=0)}")

    def end(self) -> None:
        """It keeps nothing that matters, so it need not be asked."""
        self._pipe.close()
        for slot in self._slots:
            slot.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _end(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # else this is a copy of the process that forked them
        for worker in workers:
            with suppress(ChildProcessError, ProcessLookupError):
                worker.end()


def _fork(dataset: Any, ours: Connection, theirs: Connection, slots: list[Slot]) -> int:
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
) -> _Answer:
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
