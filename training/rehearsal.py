"""Faults on purpose, for `launch drill`: ends processes of a run, or fills its disk, at the points that a plan names.

The plan comes in the environment, so the ranks run what they always run. `rehearse` puts itself around a job that is
assembled already, in front of its loader's steps, of its saves and of the folder that they write to; a run without a
plan has none of it. Each fault is written down just before it happens: what is on record did happen. Free of torch:
the launcher makes the plans.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import ConfigError
from .ranks import Ranks
from .runfolder import AttemptFolder, read_json

if TYPE_CHECKING:
    from .loop import Job
    from .saving import Saved

VARIABLE = "DDP_DRILL"
"""Holds the plan of an attempt, as `encode` writes it."""
Action = Literal["rank", "all", "host", "stop", "full"]
Where = Literal["step", "save"]

OF_RANK_0 = (
    *("make", "make", "make", "write", "write", "write", "write", "flush", "write", "flush", "publish", "flush"),
    *("publish", "flush", "remove"),
)
"""What rank 0 asks of a local folder in a save: make it and the place; its random states, the rest of the optimizer's
state, its share of the model and of the optimizer; the manifest; the name. Then an old checkpoint goes."""
OF_OTHERS = ("make", "write", "write", "write")
"""Of the other ranks: make the place; their random states and shares."""
SURE_OF_OTHERS = 2
"""So many of them are there in any case: one whose share is empty writes less."""
PUBLISHED = 11
"""From this operation of rank 0 on, and when another rank is through with the save, the checkpoint is there."""

_FILLING = frozenset({"make", "write", "flush"})
"""What a full disk refuses."""
_DRAWN = re.compile(r"\.[0-9a-f]+\.tmp$")
"""What is drawn in the name of a save that is under way."""
_GONE_WITHIN_S = 60.0
"""How long a rank waits to be ended by the kernel after it killed its host process."""


@dataclass(frozen=True)
class Fault:
    """One fault, and where it strikes."""

    number: int
    """In its plan, from 1."""
    action: Action
    """rank, all, host: SIGKILL for one rank, for all ranks at once, for the process that forked them. stop: SIGTERM for
    that process, as at a preemption. full: the disk is full."""
    where: Where
    step: int
    """In this step, or in the save after it. Where the attempt begins later: in its first one."""
    rank: int
    """The rank that acts, taken modulo the number of ranks."""
    operation: int = 0
    """In a save: at this operation of that rank's, from 0; where it has fewer, at its end."""
    share: float = 0.0
    """In [0, 1): so much of the step has passed, by the shortest one before it; or of a file's bytes is written."""
    whole: bool = False
    """full: for all tries of that save, not only once."""


def encode(record: Path, faults: Iterable[Fault]) -> str:
    """The value of VARIABLE. `record`: where faults are written down; the plan counts for runs beside that file only.

    A variable that was left in a shell does nothing to another run.
    """
    return json.dumps({"record": str(record), "faults": [asdict(fault) for fault in faults]})


def rehearse(job: Job, attempt: AttemptFolder, step: int) -> None:
    """Let the job, which goes on from `step` steps, meet the faults that the environment names. Every rank calls it."""
    try:
        told = json.loads(os.environ[VARIABLE])
        record, faults = Path(told["record"]), [Fault(**fault) for fault in told["faults"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{VARIABLE} in the environment is no plan of a drill; unset it") from None
    if not attempt.path.is_relative_to(record.parent):
        return
    writer = job.checkpoints.writer
    rehearsal = Rehearsal(record, faults, attempt, job.ranks, writer.folder.full)
    _interpose(job.loader, "steps", partial(rehearsal.steps, step + 1))
    _interpose(writer, "run", rehearsal.save)
    for kind in sorted({*OF_RANK_0, *OF_OTHERS}):
        _interpose(writer.folder, kind, partial(rehearsal.operation, kind))


def _interpose(thing: Any, method: str, ours: Callable[..., Any]) -> None:
    """Let calls of a method of this one object come to `ours(the method, *arguments)`."""
    object.__setattr__(thing, method, partial(ours, getattr(thing, method)))


class Rehearsal:
    """The faults of one attempt on one rank. Its methods stand before those that they are called with."""

    def __init__(
        self,
        record: Path,
        faults: Iterable[Fault],
        attempt: AttemptFolder,
        ranks: Ranks,
        full_name: Callable[[str], str],
    ) -> None:
        """`record`: where each one is written down. `full_name`: the whole path of a name in their folder."""
        self._full_name = full_name
        self._record, self._attempt, self._rank = record, attempt, ranks.rank
        self._faults = [fault for fault in faults if fault.rank % ranks.world_size == ranks.rank]
        self._step = 0
        """The step that is under way."""
        self._saving: int | None = None
        """The step whose save is under way."""
        self._operations = 0
        """Operations of that save so far."""
        self._full = False
        self._awaited: list[Fault] = []
        """Faults of the step that is under way, which have not struck yet."""
        self._striking = threading.Lock()

    def steps(self, first: int, real: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
        """`real(*arguments)`, whose first item is the data of step number `first`."""
        began, shortest_s = 0.0, math.inf
        for number, data in enumerate(real(*arguments), first):
            self._overdue()
            now = time.perf_counter()
            shortest_s = min(shortest_s, now - began) if number > first else math.inf
            began, self._step = now, number
            for fault in self._due("step", number):
                self._faults.remove(fault)
                wait_s = fault.share * shortest_s if number > first else 0.0
                self._awaited.append(fault)
                timer = threading.Timer(wait_s, self._strike_in_step, (fault,))
                timer.daemon = True
                timer.start()
            yield data
        self._overdue()

    def save(self, real: Callable[..., None], content: Any, saved: Saved) -> None:
        """One save, on the thread that writes it."""
        self._saving, self._operations = saved.step, 0
        real(content, saved)
        self._saving, self._full = None, False
        for fault in self._due("save", saved.step):
            if fault.action != "full":
                self._faults.remove(fault)
                self._strike(fault, saved.step, "after its last operation")

    def operation(self, kind: str, real: Callable[..., Any], name: str, *rest: Any) -> Any:
        """One operation of the folder. Errors: OSError when it is the plan that the disk is full."""
        if self._saving is None:
            return real(name, *rest)
        here, self._operations = self._operations, self._operations + 1
        if self._full and kind in _FILLING:
            raise self._no_space(name)
        for fault in [fault for fault in self._due("save", self._saving) if fault.operation == here]:
            self._faults.remove(fault)
            away = kind == "publish" and rest[0].startswith(".")  # an old checkpoint, hidden before it is removed
            point = f"{'hide' if away else kind} {_DRAWN.sub('.tmp', name.rpartition('/')[2]) or 'the folder'}"
            if kind == "write" and fault.action != "stop":
                real(name, _beginning(rest[0], fault.share))
                point += f", {fault.share:.0%} of its bytes"
            self._strike(fault, self._saving, point)
            if fault.action == "full":
                self._full = fault.whole
                raise self._no_space(name)
        return real(name, *rest)

    def _due(self, where: Where, step: int) -> list[Fault]:
        return [fault for fault in self._faults if fault.where == where and fault.step <= step]

    def _overdue(self) -> None:
        """The step that was under way is over: what was to strike in it does so now, if its thread came too late."""
        for fault in list(self._awaited):
            self._strike_in_step(fault)

    def _strike_in_step(self, fault: Fault) -> None:
        """Once for each fault, from the thread that waited for it or from the one that trains."""
        with self._striking:
            if fault in self._awaited:
                self._awaited.remove(fault)
                self._strike(fault, self._step, "")

    def _strike(self, fault: Fault, step: int, point: str) -> None:
        """Write the fault down and do it. SIGKILL for this rank or its host does not return."""
        self._write_down({"number": fault.number, "attempt": self._attempt.number, "step": step, "point": point})
        if fault.action == "stop":
            os.kill(os.getppid(), signal.SIGTERM)
        elif fault.action == "host":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(_GONE_WITHIN_S)
        elif fault.action != "full":
            for pid in self._others() if fault.action == "all" else []:
                os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def _no_space(self, name: str) -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._full_name(name))

    def _others(self) -> list[int]:
        """Process ids of the other ranks, which have written them down before they met."""
        pids = [int(read_json(path)["pid"]) for path in self._attempt.path.glob("env-*.json")]
        return [pid for pid in pids if pid != os.getpid()]

    def _write_down(self, what: dict[str, Any]) -> None:
        """No sync: what is written outlives the process, and the milliseconds of one would move the fault elsewhere."""
        descriptor = os.open(self._record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps({**what, "rank": self._rank, "time": time.time()}).encode() + b"\n")
        finally:
            os.close(descriptor)


def _beginning(chunks: Iterable[bytes | memoryview], share: float) -> Iterator[memoryview]:
    """The first bytes of a file, that share of them."""
    views = [memoryview(chunk).cast("B") if len(chunk) else memoryview(b"") for chunk in chunks]
    left = int(share * sum(map(len, views)))
    for view in views:
        yield view[:left]
        left = max(0, left - len(view))
