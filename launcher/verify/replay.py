"""`launch verify --deep`: trains an interval between two checkpoints again, on this machine, and compares bit for bit.

The replay is a run of its own in a temporary folder: it begins with a copy of the interval's first checkpoint, has as
many ranks, and saves at the interval's last step. Free of torch: checkpoints are compared as the files they are.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from training.config import to_plain
from training.runfolder import RunFolder, read_json, write_json
from training.storage import Folder, LocalFolder

from .. import executors
from ..host import HostJob, read_host_pid
from ..script import Submission
from ..spec import JobSpec
from .attempts import Attempt, Began
from .checkpoints import MANIFEST, Kept
from .difference import first_difference
from .report import Check

POLL_S = 0.1
STOP_WAIT_S = 150.0
"""How long the replay may take to stop once it has saved: longer than the host process gives its ranks."""

_SAVES = {"folder": None, "every_minutes": None, "auto": False, "at_end": True, "keep_last": 2, "keep_best": None}
"""Where and when a replay saves, but for the step."""


@dataclass(frozen=True)
class Interval:
    """What is trained again."""

    start: Kept | None
    """None: from the beginning of the run."""
    end: Kept

    def __str__(self) -> str:
        return f"steps {self.start.step if self.start else 0:,} to {self.end.step:,} on {self.end.world_size} ranks"


def check(folder: RunFolder, spec: JobSpec, place: Folder, kept: list[Kept], attempts: list[Attempt]) -> Check:
    """Whether training the newest interval that can be replayed again gives the same checkpoint, bit for bit."""
    result = Check("replay")
    interval = choose(kept, attempts)
    if interval is None:
        result.notes.append(
            "between no two checkpoints that are still there were ranks and settings the same all the way"
        )
        return result
    with tempfile.TemporaryDirectory(prefix="ddp-replay-", ignore_cleanup_errors=True) as temporary:
        first, why = _replay(Path(temporary) / "first", folder, spec, place, interval)
        if first is None:
            result.faults.append(f"{interval}: the replay did not come to its end: {why}")
            return result
        found = first_difference(place, interval.end, first)
        if found is None:
            result.text = (
                f"{interval} trained again: parameters, optimizer, random states and ledger are equal bit for bit"
            )
            return result
        second, why = _replay(Path(temporary) / "second", folder, spec, place, interval)
        result.faults.append(f"{place.full(interval.end.name)}/{found}")
        if second is None:
            result.notes.append(f"a second replay did not come to its end: {why}")
        elif (again := first_difference(first, interval.end, second)) is not None:
            result.notes.append(f"two replays differ from each other as well, first in {again}:")
            result.notes.append("this task does not compute the same twice, so no replay can prove what it did")
        else:
            result.notes.append("two replays agree with each other: the task computes the same each time here")
            result.notes.append(f"the run was made with {interval.end.versions}")
    return result


def choose(kept: list[Kept], attempts: list[Attempt]) -> Interval | None:
    """The newest interval in which no attempt had other ranks or settings than the run has now, else None."""
    begun = [attempt.began for attempt in attempts if attempt.began is not None]
    for place in range(len(kept) - 1, -1, -1):
        end, start = kept[place], kept[place - 1] if place else None
        first = start.step if start else 0
        active = [one for one in begun if one.step <= first][-1:]
        active += [one for one in begun if first < one.step < end.step]
        if {one.world_size for one in active} == {end.world_size} and all(_alike(one, begun[-1]) for one in active):
            return Interval(start, end)
    return None


def _alike(one: Began, last: Began) -> bool:
    return (one.data, one.optim, one.schedule, one.total_steps) == (
        last.data,
        last.optim,
        last.schedule,
        last.total_steps,
    )


def _replay(
    path: Path, folder: RunFolder, spec: JobSpec, place: Folder, interval: Interval
) -> tuple[Folder | None, str]:
    """Train the interval in `path`: the folder with its last checkpoint, or None and why there is none."""
    replayed = _prepare(path, folder, spec, place, interval)
    saved = replayed.checkpoints / interval.end.name / MANIFEST
    process = executors.start_local(Submission(replayed, secrets.token_hex(8), path), HostJob(str(path)))
    try:
        while process.poll() is None and not saved.exists():
            time.sleep(POLL_S)
    finally:
        _stop(process, replayed)
    if saved.exists():
        return LocalFolder(replayed.checkpoints), ""
    result = replayed.attempt(1).result
    told = read_json(result) if result.exists() else {}
    return None, str(told.get("text") or "see a plain `launch` of its spec on this machine")


def _prepare(path: Path, folder: RunFolder, spec: JobSpec, place: Folder, interval: Interval) -> RunFolder:
    """A run folder that ends with the interval: here, and saving where it is compared."""
    replayed = RunFolder(path)
    for inner in (path, replayed.attempts, replayed.submitit, replayed.checkpoints):
        inner.mkdir(mode=0o700)
    plain = to_plain(spec) | {"executor": "local", "wandb": None, "restart": {"mode": "none"}}
    if spec.resources.nodes * spec.resources.tasks_per_node != interval.end.world_size:
        plain["resources"] |= {"nodes": 1, "tasks_per_node": interval.end.world_size}
    plain["train"]["checkpoint"] |= _SAVES | {"every_steps": interval.end.step}
    replayed.spec.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    known = read_json(folder.run_json) if folder.run_json.exists() else {}
    own = {"run_id": replayed.run_id, "secret": secrets.token_hex(32)}
    write_json(
        replayed.run_json, {"workdir": str(Path.cwd()), "python_path": [], "spec": str(folder.source)} | known | own
    )
    if interval.start is not None:
        copy = replayed.checkpoints / interval.start.name
        copy.mkdir()
        for name in (*interval.start.files, MANIFEST):
            _copy(place, f"{interval.start.name}/{name}", copy / name)
    return replayed


def _copy(place: Folder, name: str, target: Path) -> None:
    local = place.local(name)
    if local is not None:
        shutil.copyfile(local, target)
    else:
        target.write_bytes(place.read(name))


def _stop(process: subprocess.Popen[bytes], replayed: RunFolder) -> None:
    """Let the replay save and leave; one that does not is killed."""
    if process.poll() is not None:
        return
    host = read_host_pid(replayed.attempt(1))
    with suppress(ProcessLookupError):
        os.kill(process.pid if host is None else host, signal.SIGTERM)
    try:
        process.wait(STOP_WAIT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.kill(process.pid if host is None else host, signal.SIGQUIT)
        process.kill()
        process.wait()
