"""A rank's worker processes: what it asks of them, and how their batches come back.

Of each worker the rank keeps a pipe, over which requests go and answers come, and some slots of memory without a name,
of which nothing can be left behind. A slot is used again when no part of its batches is held any more.
"""

from __future__ import annotations

import os
import select
import signal
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Pipe
from typing import Any

import numpy as np

from .errors import DataError
from .keyed import keyed_reader
from .parcel import How, Slot, unpack
from .permute import Indices
from .workers import Answer, fork_worker

Asked = tuple[int, Indices]
"""An epoch, and samples of it."""

_MOST, _QUICK_S, _SMALL = 64, 0.002, 1_000_000
"""A group has at most so many batches, and grows while its worker needs less than these seconds and bytes for it."""
_FIRST_LOOK_S, _LOOK_BATCHES, _CLEARLY = 0.02, 16, 4
"""After so many seconds of waiting for workers, and so many batches, the rank asks whether they spare it any time.
They do when they worked for many times as long as it waited; else it makes some batches itself, as a trial."""
_TRIAL, _TRIAL_S, _FIRST_ALONE_S, _LONGEST_S = 16, 0.05, 0.25, 60.0
"""A trial of so many batches, or seconds. While they take less time than waiting did it goes on alone, each time twice
as long before workers get another trial; otherwise the next trial is twice as far away."""
_HELD = 2
"""Slots of a worker that may be held by batches in use, besides those of batches that are under way."""
_LOOK_MS = 1000


class Pool:
    """`workers` processes, each with `prefetch` groups of batches ahead. They end with the pool or this process."""

    def __init__(self, dataset: Any, workers: int, prefetch: int, pinned: bool) -> None:
        """`pinned`: CPU tensors of batches lie in page-locked memory.

        Errors: TypeError when the dataset cannot be read.
        """
        keyed_reader(dataset, 0)
        self._dataset, self._pinned, self._most = dataset, pinned, workers * prefetch
        self._alone_s, self._next_alone_s, self._look_s = 0.0, _FIRST_ALONE_S, _FIRST_LOOK_S
        self._waited_s = 0.0
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end, self._workers, os.getpid())
        for number in range(workers):
            self._workers.append(_Worker(dataset, number, prefetch))

    def batches(self, seed: int, asked: Iterable[Asked]) -> Iterator[Any]:
        """One batch for each (epoch, indices), in their order. One such iterator at a time.

        Batches that this process makes sooner than it gets them from workers, it makes; now and then it tries again.
        Errors: DataError when a sample could not be made, with the worker's traceback, or when a worker died.
        """
        requests = iter(asked)
        read = keyed_reader(self._dataset, seed)
        for worker in self._workers:
            worker.forget()
        while True:
            begin, made = self._alone_s, 0
            while self._alone_s > 0 and (request := next(requests, None)):
                start = time.perf_counter()
                batch = read(*request)
                self._alone_s -= time.perf_counter() - start
                made, spent = made + 1, begin - self._alone_s
                if spent > made * self._waited_s and (made >= _TRIAL or spent > _TRIAL_S):
                    self._alone_s, self._next_alone_s = 0.0, _FIRST_ALONE_S
                    self._look_s = min(2 * self._look_s, _LONGEST_S)
                yield batch
            if self._alone_s > 0 or (yield from self._by_workers(seed, requests)):
                return
            self._alone_s, self._next_alone_s = self._next_alone_s, min(2 * self._next_alone_s, _LONGEST_S)

    def _by_workers(self, seed: int, requests: Iterator[Asked]) -> Generator[Any, None, bool]:
        """Batches until there are no more requests (True), or until it is worth a trial to make them here.

        Small ones are asked for and handed over in groups: one costs 50 us on its way, whatever its size.
        """
        ahead, turn = deque[_Worker](), cycle(self._workers)
        count, batches, waited, worked, worth = 1, 0, 0.0, 0.0, True
        while group := list(islice(requests, count)) if worth else []:
            start = time.perf_counter()
            made: list[Any] = []
            if len(ahead) == self._most:
                made, seconds, more = ahead.popleft().receive(self._pinned)
                count = min(2 * count, _MOST) if more else max(count // 2, 1)
                batches, worked = batches + len(made), worked + seconds
            worker = next(turn)
            worker.send(seed, group)
            ahead.append(worker)
            waited += time.perf_counter() - start
            if waited > self._look_s and batches >= _LOOK_BATCHES and not self._pinned:
                worth, self._waited_s = worked > _CLEARLY * waited, waited / batches
                batches, waited, worked = 0, 0.0, 0.0
            while made:
                yield made.pop()
        while ahead:
            made, _, _ = ahead.popleft().receive(self._pinned)
            while made:
                yield made.pop()
        return worth


class _Worker:
    """The rank's side of a worker."""

    def __init__(self, dataset: Any, number: int, prefetch: int) -> None:
        self._number = number
        self._slots = [Slot() for _ in range(prefetch + _HELD)]
        self._free = deque(range(len(self._slots)))
        self._under_way: deque[int] = deque()
        self._pipe, theirs = Pipe()
        self.pid = fork_worker(dataset, self._pipe, theirs, self._slots)
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

    def receive(self, pinned: bool) -> tuple[list[Any], float, bool]:
        """The next batches that it was asked for, the first one last; its seconds; whether a larger group is in order.

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
        return made[::-1], seconds, seconds < _QUICK_S and parcel.size < _SMALL

    def forget(self) -> None:
        """Drop what an earlier iterator asked for and did not take."""
        while self._under_way:
            self._answer()
            self._free.append(self._under_way.popleft())

    def _answer(self) -> Answer:
        while not self._answers.poll(_LOOK_MS):
            if self._end_of(os.WNOHANG):  # what it had started itself may still hold its end of the pipe
                raise self._gone()
        try:
            answer: Answer = self._pipe.recv()
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
