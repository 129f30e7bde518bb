"""`launch resume RUN`: another attempt of a run that ended, from its newest checkpoint on."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from training.config import BatchConfig, from_plain
from training.runfolder import RunFolder, read_json, write_json
from training.schedule import batch_plan

from . import lock, slurm, specfile
from .amend import amend, take_back
from .errors import LaunchError, SpecError, UsageError
from .host import read_host_pid
from .processes import is_running
from .runspec import load_spec
from .screen import tell
from .script import Submission
from .specfile import Resolved, dumped
from .verify import checkpoint_folder, checkpoints

_FIXED = frozenset(
    {
        "name",
        "runs",
        "command",
        "train.task",
        "train.options",
        "train.seed",
        "train.optim",
        "train.schedule",
        "train.precision",
        "train.reproducible",
        "train.data.shuffle",
        "train.data.last",
        "train.data.lanes",
        "train.data.window",
        "train.checkpoint.folder",
    }
)
"""What a run's steps hang on, beside the global batch, which the checkpoint knows. Its length may change, and so may
where and with how many ranks it runs."""


def prepare(run: RunFolder, overrides: list[str], change: bool) -> tuple[Resolved, Submission]:
    """As `_prepare`. Errors: also LaunchError for a folder whose files are not those of a run."""
    try:
        lock.hold(run)
        return _prepare(run, overrides, change)
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LaunchError(f"{run.path}: is not the folder of a run as it was written: {_line(error)}") from error
    except FileNotFoundError as error:
        raise LaunchError(f"{error.filename}: is missing: this is not the whole folder of a run") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _prepare(run: RunFolder, overrides: list[str], change: bool) -> tuple[Resolved, Submission]:
    """Make a run folder ready for another attempt, with `overrides` in its spec.

    Errors: SpecError for overrides that are wrong; UsageError when they change the global batch, or what else the run's
    steps hang on and `change` is not set; LaunchError while an attempt still runs.
    """
    refuse_running(run)
    if (refused := take_back(run)) is not None:
        tell(f"{run.run_id}: attempt {refused} could not begin with what the last resume changed: that is taken back")
    before = yaml.safe_load(run.spec.read_text(encoding="utf-8"))
    whole = _global_batch(run, overrides)
    resolved = _resolve(run, overrides, whole)
    keeps = _kept_per_rank(before, resolved) if whole is not None else []
    if keeps:
        resolved = _resolve(run, [*overrides, *keeps], whole)
    if whole is not None:
        _refuse_other_batch(run, resolved, whole)
    attempt = run.last_attempt()
    changed = dict(_differences(before, resolved.plain(), ""))
    kept = {keep.partition("=")[0] for keep in keeps}
    fixed = [path for path in changed if path not in kept and _is_fixed(path, resolved)]
    if fixed and not change:
        raise UsageError(
            f"{run.run_id}: {', '.join(f'{path}: {changed[path]}' for path in fixed)}: its steps up to now were made "
            "otherwise; launch a new run, with train.init_from for its weights, or say --change if you mean it"
        )
    identity = read_json(run.run_json)
    token = secrets.token_hex(8)
    write_json(run.run_json, {**identity, "token": token})
    if changed:
        amend(run, resolved.dump(), overrides, changed)
    return resolved, Submission(run, token, Path(identity["workdir"]), attempt.number if attempt is not None else 0)


def _is_fixed(path: str, resolved: Resolved) -> bool:
    train = resolved.spec.train
    if path == "train.batch.per_rank" and train is not None and train.reproducible:
        return True  # the micro-batches are what a step's bits hang on
    return any(path == fixed or path.startswith(f"{fixed}.") for fixed in _FIXED)


def _refuse_other_batch(run: RunFolder, resolved: Resolved, whole: int) -> None:
    """Errors: UsageError for a global batch other than the newest checkpoint's."""
    assert resolved.spec.train is not None
    resources = resolved.spec.resources
    size = batch_plan(resolved.spec.train.batch, resources.nodes * resources.tasks_per_node).global_size
    if size != whole:
        raise UsageError(
            f"{run.run_id}: train.batch: its steps up to now had a global batch of {whole}, this would be one of "
            f"{size}; leave train.batch out, or launch a new run, with train.init_from for its weights"
        )


def refuse_running(run: RunFolder) -> None:
    """Errors: LaunchError naming the process or the job of an attempt that still runs."""
    attempt = run.last_attempt()
    pid = read_host_pid(attempt) if attempt is not None else None
    if attempt is not None and pid is not None and not attempt.result.exists() and is_running(pid):
        raise LaunchError(f"{run.run_id}: attempt {attempt.number} still runs here, as process {pid}")
    job = run.path / "job.json"
    if job.exists() and slurm.available():
        job_id = str(read_json(job)["job_id"])
        state = slurm.job_state(job_id)
        if not state.ended and state.state != "UNKNOWN":
            raise LaunchError(f"{run.run_id}: job {job_id} is {state.state.lower()}; scancel {job_id} ends it")


def _kept_per_rank(before: dict[str, Any], resolved: Resolved) -> list[str]:
    """Overrides that keep the micro-batch of a rank, by accumulation, where the global batch is a multiple of it.

    A step's last bits and its memory hang on it, and the figures of a batch norm.
    """
    assert resolved.spec.train is not None
    batch, resources = resolved.spec.train.batch, resolved.spec.resources
    if batch.per_rank is not None or batch.accumulate is not None or batch.global_size is None:
        return []
    earlier = before["resources"]["nodes"] * before["resources"]["tasks_per_node"]
    per_rank = batch_plan(from_plain(BatchConfig, before["train"]["batch"]), earlier).per_rank
    if batch.global_size % (per_rank * resources.nodes * resources.tasks_per_node):
        return []
    return [f"train.batch.per_rank={per_rank}"]


def _global_batch(run: RunFolder, overrides: list[str]) -> int | None:
    """Samples in a step: of the newest checkpoint, or where there is none yet, what the spec made them.

    None for a command, and where nothing is saved yet and the batch is set anew.
    """
    spec = load_spec(run)
    if spec.train is None:
        return None
    folder = checkpoint_folder(run, spec)
    for name in sorted(folder.names(), reverse=True):
        if name.startswith("step-"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                return int(checkpoints.parse(folder, name).ledger["data"]["global_size"])
    if any(override.startswith("train.batch") for override in overrides):
        return None
    return batch_plan(spec.train.batch, spec.resources.nodes * spec.resources.tasks_per_node).global_size


def _resolve(run: RunFolder, overrides: list[str], whole: int | None) -> Resolved:
    """The run's spec with overrides. What stands in it is resolved already: a `${` in it is text.

    The global batch, where it is known, takes the place of what the spec says of the batch; of a reproducible run the
    micro-batches stay too.
    """
    values = _escaped(yaml.safe_load(run.spec.read_text(encoding="utf-8")))
    if whole is not None:
        size = values["train"]["batch"]["per_rank"] if values["train"].get("reproducible") else None
        values["train"]["batch"] = {"per_rank": size, "global": whole, "accumulate": None}
    source = run.source.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(dumped(values), encoding="utf-8")
        try:
            resolved = specfile.resolve(path, overrides)
        except SpecError as error:
            if whole is not None and all(fault.field.startswith("train.batch") for fault in error.faults):
                raise UsageError(_indivisible(run, whole, error)) from None
            faults = [replace(f, file=str(run.spec)) if f.file == str(path) else f for f in error.faults]
            raise SpecError(faults) from None
    return replace(resolved, path=run.spec, source_text=source)


def _indivisible(run: RunFolder, whole: int, error: SpecError) -> str:
    possible = [str(ranks) for ranks in range(1, whole + 1) if whole % ranks == 0]
    shown = ", ".join(possible[:12]) + (" and more" if len(possible) > 12 else "")
    fault = error.faults[0]
    return (
        f"{run.run_id}: {fault.field}: {fault.wrong}. The run's steps have a global batch of {whole}, which stays; "
        f"it can go on with {shown} ranks"
    )


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value


def _differences(before: Any, after: Any, path: str) -> Iterator[tuple[str, str]]:
    """Dotted paths at which two specs differ, and `old -> new`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            yield from _differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif before != after:
        yield path, f"{before!r} -> {after!r}"
