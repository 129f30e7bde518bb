"""Worker processes that make batches, and hand them over through memory that they share with the rank.

Workers are forked, so that nothing of the dataset is pickled or read again and they are there in milliseconds. What
another thread holds at that moment stays locked in them for ever (such as torch's generator, while it draws): so they
are forked once, when the loader is made, before the rank starts threads of its own, and they live as long as it.

Of each worker the rank keeps a pipe, over which requests go and answers come, and `prefetch` slots of memory without a
name, of which nothing can be left behind. The rank copies a batch out of its slot before it uses the slot again, so a
batch that is still held is never overwritten.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import torch

from .errors import DataError
from .keyed import keyed_reader
from .parcel import Parcel, Slot, pack, unpack
from .permute import Indices

Asked = tuple[int, Indices]
"""An epoch, and samples of it."""

_PR_SET_PDEATHSIG = 1
_LOOK_MS = 1000
_libc = ctypes.CDLL(None)


class Pool:
    """`workers` processes, each with up to `prefetch` batches ahead. They end with the pool, or with this process."""

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

        Errors: DataError when a sample could not be made, with the worker's traceback, or when a worker died.
        """
        for worker in self._workers:
            worker.forget()
        ahead: deque[_Worker] = deque()
        for place, (epoch, indices) in enumerate(asked):
            done = [ahead.popleft().receive(self._pinned)] if len(ahead) == self._most else []
            worker = self._workers[place % len(self._workers)]
            worker.send(seed, epoch, indices)
            ahead.append(worker)
            yield from done
        while ahead:
            yield ahead.popleft().receive(self._pinned)


class _Worker:
    """The rank's side of a worker."""

    def __init__(self, dataset: Any, number: int, prefetch: int) -> None:
        self._number = number
        self._slots = [Slot() for _ in range(prefetch)]
        self._sent = self._received = 0
        self._pipe, theirs = Pipe()
        self.pid = _fork(dataset, self._pipe, theirs, self._slots)
        theirs.close()
        self._answers = select.poll()
        self._answers.register(self._pipe.fileno(), select.POLLIN)

    def send(self, seed: int, epoch: int, indices: Indices) -> None:
        """Ask for a batch. All that may be long goes through the slot: were the pipe full, both sides would wait."""
        place = self._sent % len(self._slots)
        self._slots[place].view(indices.nbytes).view(np.int64)[:] = indices
        try:
            self._pipe.send((place, seed, epoch, indices.nbytes))
        except ConnectionError:
            raise self._gone() from None
        self._sent += 1

    def receive(self, pinned: bool) -> Any:
        """The next batch that it was asked for."""
        slot = self._slots[self._received % len(self._slots)]
        answer = self._answer()
        if isinstance(answer, str):
            raise DataError(f"data worker {self._number}: {answer}")
        return unpack(answer, slot, pinned)

    def forget(self) -> None:
        """Drop what an earlier iterator asked for and did not take."""
        while self._received < self._sent:
            self._answer()

    def _answer(self) -> Parcel | str:
        while not self._answers.poll(_LOOK_MS):
            if self._end_of(os.WNOHANG):  # what it had started itself may still hold its end of the pipe
                raise self._gone()
        try:
            answer: Parcel | str = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._gone() from None
        self._received += 1
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
            place, seed, epoch, size = pipe.recv()
            indices = slots[place].view(size).view(np.int64).copy()
            try:
                answer: Parcel | str = pack(reader(seed)(epoch, indices), slots[place])
            except Exception as error:  # noqa: BLE001 - whatever the user's code raises is shown on the rank
                answer = _told(error, indices)
            sys.stdout.flush()  # it will be killed, not asked to leave
            pipe.send(answer)


def _told(error: Exception, indices: Indices) -> str:
    shown = ", ".join(map(str, indices[:8].tolist()))
    notes = " ".join(getattr(error, "__notes__", []))
    what = notes or f"while a batch of {len(indices)} samples ({shown}{', ...' if len(indices) > 8 else ''}) was made"
    return f"{type(error).__name__}: {error}, {what}\n{''.join(traceback.format_exception(error)).rstrip()}"
