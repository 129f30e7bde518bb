"""`launch verify`: whether a run is what its spec says, from what its folder holds. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training.runfolder import RunFolder, read_json
from training.storage import Folder, open_folder

from ..errors import DONE, JOB_FAILED, LaunchError, UsageError
from ..runspec import load_spec
from ..spec import JobSpec
from . import attempts, checkpoints, consumed, metrics
from .report import Check


def verify(words: str, deep: bool) -> int:
    """Check a run and print a line for each check, then the verdict; returns the exit code.

    `words`: a run folder, or the id of a run below ./runs. `deep`: also train a part of it again, here.
    Errors: UsageError when there is no such run; LaunchError when its checkpoints cannot be read at all.
    """
    folder = find(words)
    print(f"run  {folder.run_id}  {folder.path}", flush=True)
    wrong, held, open_ends = 0, 0, 0
    for check in checks(folder, deep):
        print("\n".join(check.lines()), flush=True)
        wrong += len(check.faults)
        held += bool(check.text) and not check.faults
        open_ends += not check.text and not check.faults
    if wrong:
        print(f"verdict  {wrong} {'thing is' if wrong == 1 else 'things are'} wrong")
        return JOB_FAILED
    if not held:
        print("verdict  nothing is recorded, so nothing is proved")
        return JOB_FAILED
    print(f"verdict  everything holds{' that is recorded' if open_ends else ''}")
    return DONE


def find(words: str) -> RunFolder:
    """Errors: UsageError with where was looked."""
    for path in (Path(words), Path("runs") / words):
        if RunFolder(path).spec.is_file():
            return RunFolder(path.resolve())
    raise UsageError(f"{words}: no run folder (one has a spec.yaml), nor is there a run runs/{words}")


def checks(folder: RunFolder, deep: bool) -> Iterator[Check]:
    """The checks of a run, each as soon as it is done."""
    spec = _spec(folder)
    tried = Check("attempts")
    known = attempts.read(folder, tried)
    if spec.train is None:
        attempts.examine(tried, known, folder, None, [], set())
        yield tried
        return
    place = checkpoint_folder(folder, spec)
    try:
        kept, whole = checkpoints.read(place)
    except OSError as error:
        raise LaunchError(f"{place.full('')}: the checkpoints cannot be read: {error}") from error
    yield whole
    yield from consumed.check(kept, spec.train)
    written = Check("metrics")
    lines = metrics.read(folder.metrics, written)
    newest = max((one.step for one in kept), default=0)
    metrics.examine(written, folder.metrics, lines, known, newest)
    yield written
    attempts.examine(tried, known, folder, spec.train, kept, checkpoints.set_aside(place))
    yield tried
    if deep:
        from . import replay

        yield replay.check(folder, spec, place, kept, known)


def checkpoint_folder(folder: RunFolder, spec: JobSpec) -> Folder:
    """Where a run's checkpoints are. A relative path in the spec starts at the folder that `launch` was called in."""
    assert spec.train is not None
    given = spec.train.checkpoint.folder
    if given is None:
        return open_folder(str(folder.checkpoints))
    if "://" not in given and folder.run_json.exists():
        given = str(Path(read_json(folder.run_json)["workdir"]) / given)
    try:
        return open_folder(given)
    except OSError as error:
        raise LaunchError(f"train.checkpoint.folder: {error}") from error


def _spec(folder: RunFolder) -> JobSpec:
    try:
        return load_spec(folder)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LaunchError(f"{folder.spec}: cannot be read: {error}") from error
