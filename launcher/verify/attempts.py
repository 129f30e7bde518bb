"""The attempts of a run: their folders, verdicts, and that each went on from what the ones before it had saved."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.config import OptimConfig, ScheduleConfig, TrainConfig, from_plain, to_plain
from training.ledger import Data
from training.runfolder import RunFolder, read_json
from training.schedule import lr_at, scaled_lr

from .checkpoints import Kept
from .report import Check, count


@dataclass(frozen=True)
class Began:
    """What an attempt went on from, and what its steps hang on, as its rank 0 wrote it down."""

    step: int
    samples: int
    world_size: int
    total_steps: int
    log_every_steps: int
    data: Data
    optim: OptimConfig
    schedule: ScheduleConfig

    @classmethod
    def parse(cls, record: dict[str, Any]) -> Began:
        """Errors: KeyError, TypeError, ValueError when something is missing or is no number."""
        step, samples, world_size, total, every = (
            int(record[key]) for key in ("step", "samples", "world_size", "total_steps", "log_every_steps")
        )
        data = Data(**record["data"])
        if min(world_size, every, data.samples, data.epoch_samples, data.global_size) < 1 or min(step, samples) < 0:
            raise ValueError("its numbers are not those of an attempt")
        optim, schedule = from_plain(OptimConfig, record["optim"]), from_plain(ScheduleConfig, record["schedule"])
        return cls(step, samples, world_size, total, every, data, optim, schedule)

    def consumed(self, step: int) -> int:
        """Samples that the run has consumed when this attempt has done step number `step`."""
        return self.data.consumed(step - self.step, self.samples)

    def rate(self, step: int) -> float:
        """The learning rate of step number `step`, from 1."""
        return lr_at(step - 1, scaled_lr(self.optim, self.data.global_size), self.schedule, self.total_steps)


@dataclass
class Attempt:
    """What is known of one attempt."""

    number: int
    began: Began | None
    """None when it never came so far."""
    stopped: dict[str, Any] | None
    verdict: dict[str, Any] | None
    steps: list[int] = field(default_factory=list)
    """Steps of its training lines in the metrics, as they were written."""


def read(folder: RunFolder, check: Check) -> list[Attempt]:
    """All attempts by number. A file that cannot be read is a fault."""
    found = []
    numbers = sorted(int(path.name) for path in folder.attempts.glob("[0-9]*") if path.name.isdigit())
    check.faults += [
        f"{folder.attempt(number).path}: this attempt's folder is missing"
        for number in range(1, max(numbers, default=0))
        if number not in numbers
    ]
    for number in numbers:
        place = folder.attempt(number)
        record, stopped, verdict = (_read(path, check) for path in (place.began, place.stopped, place.result))
        began = None
        try:
            began = Began.parse(record) if record is not None else None
        except (KeyError, TypeError, ValueError) as error:
            check.faults.append(f"{place.began}: not valid: {type(error).__name__}: {error}")
        found.append(Attempt(number, began, stopped, verdict))
    return found


def examine(
    check: Check,
    attempts: list[Attempt],
    folder: RunFolder,
    train: TrainConfig | None,
    kept: list[Kept],
    aside: set[int],
) -> None:
    """Add to `check` whether the attempts make one unbroken run.

    `kept`: the checkpoints that are still there; `aside`: steps of those that were set aside.
    """
    _verdicts(check, attempts, folder)
    begun = [(attempt, attempt.began) for attempt in attempts if attempt.began is not None]
    for place, (attempt, began) in enumerate(begun):
        check.faults += _start(attempt, began, begun[:place], kept, aside)
        if place:
            check.notes += _changes(attempt.number, begun[place - 1][1], began)
    if begun and begun[-1][0] is attempts[-1]:
        check.faults += _end(*begun[-1], kept, train)
        if train is not None:
            check.faults += _against_spec(*begun[-1], train)
    if not attempts or check.faults:
        return
    check.text = f"{count(len(attempts), 'attempt')}: {', '.join(_cause(attempt) for attempt in attempts)}"
    if len(begun) > 1:
        check.text += f"; went on from step {', '.join(f'{began.step:,}' for _, began in begun[1:])}"
    again = sum(max(0, max([0, *before.steps]) - began.step) for (before, _), (_, began) in pairwise(begun))
    if again:
        be = "was" if again == 1 else "were"
        check.notes.append(f"{count(again, 'step')} that had been logged but not saved {be} taken again")


def _verdicts(check: Check, attempts: list[Attempt], folder: RunFolder) -> None:
    """attempts.jsonl has one line for each verdict, and says the same."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for number, line in enumerate(_lines(folder.attempts_jsonl), 1):
        try:
            row = json.loads(line)
            rows.setdefault(int(row["attempt"]), []).append(row)
        except (ValueError, KeyError, TypeError):
            check.notes.append(f"attempts.jsonl:{number}: half a line, of a process that was killed while it wrote")
    for attempt in attempts:
        own = rows.pop(attempt.number, [])
        if len(own) > 1:
            check.faults.append(f"{folder.attempts_jsonl}: {len(own)} lines of attempt {attempt.number}")
        if attempt.verdict is None:
            continue
        if not own:
            check.notes.append(
                f"attempts.jsonl has no line of attempt {attempt.number}; its result.json has the verdict"
            )
        for row in own:
            if (row["cause"], row["exit_code"]) != (attempt.verdict["cause"], attempt.verdict["exit_code"]):
                check.faults.append(
                    f"{folder.attempts_jsonl}: attempt {attempt.number} is {row['cause']} with exit code "
                    f"{row['exit_code']}, but its result.json says {_cause(attempt)}"
                )
    check.faults += [f"{folder.attempts_jsonl}: attempt {number} has no folder" for number in rows]


def _start(
    attempt: Attempt, began: Began, before: list[tuple[Attempt, Began]], kept: list[Kept], aside: set[int]
) -> list[str]:
    """An attempt begins at 0, or at a step that an earlier one had reached and saved."""
    where = f"attempts/{attempt.number:04d}/began.json: attempt {attempt.number} went on from step {began.step:,}"
    faults = []
    if attempt.steps and min(attempt.steps) <= began.step:
        faults.append(f"{where}, but logged step {min(attempt.steps):,}")
    came = [one for one in before if one[1].step <= began.step <= _reach(*one)]
    if began.step and not came:
        faults.append(f"{where}, which no attempt before it had reached")
    due = came[-1][1].consumed(began.step) if came else 0
    if began.samples != due and (came or not began.step):
        faults.append(f"{where} with {began.samples:,} samples, but {due:,} are due")
    for one in kept:
        if one.step == began.step and one.samples != began.samples:
            faults.append(f"{where} with {began.samples:,} samples, but {one.name} has {one.samples:,}")
    stopped = before[-1][0].stopped if before else None
    saved = stopped["step"] if stopped is not None else None
    if saved is not None and saved != began.step and saved not in aside:
        faults.append(f"{where}, but the attempt before it had stopped cleanly and saved at step {saved:,}")
    return faults


def _reach(attempt: Attempt, began: Began) -> int:
    """The last step that it may have taken: those after its last line were not due to be logged."""
    return max([began.step, *attempt.steps]) + began.log_every_steps - 1


def _end(attempt: Attempt, began: Began, kept: list[Kept], train: TrainConfig | None) -> list[str]:
    """A run that is done has saved its last step."""
    newest = max((one.step for one in kept), default=None)
    if newest is None and _cause(attempt) == "done" and train is not None and train.checkpoint.at_end:
        return ["the run is done, and its spec saves at the end, but it has no checkpoint"]
    if newest is None and attempt.stopped is not None and attempt.stopped["step"]:
        return [f"the run stopped cleanly and saved at step {attempt.stopped['step']:,}, but it has no checkpoint"]
    if _cause(attempt) != "done" or newest is None or newest >= began.total_steps:
        return []
    return [f"the run is done with {began.total_steps:,} steps, but its newest checkpoint is of step {newest:,}"]


def _against_spec(attempt: Attempt, began: Began, train: TrainConfig) -> list[str]:
    """What the last attempt did otherwise than the spec, as it is now, says."""
    where = f"attempts/{attempt.number:04d}/began.json"
    pairs = [("train.optim", began.optim, train.optim), ("train.schedule", began.schedule, train.schedule)]
    return [
        f"{where}: {name}.{key} was {was}, the spec makes it {now}"
        for name, then, spec in pairs
        for key, was, now in _differences(to_plain(then), to_plain(spec))
    ]


def _changes(number: int, before: Began, began: Began) -> list[str]:
    """Settings that a resume changed, for the reader."""
    then, now = asdict(before), asdict(began)
    names = ("data", "optim", "schedule")
    changed = [f"{key} {was} -> {new}" for name in names for key, was, new in _differences(then[name], now[name])]
    return [f"from attempt {number} on: {', '.join(changed)}"] if changed else []


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(key, before[key], after[key]) for key in before if before[key] != after[key]]


def _cause(attempt: Attempt) -> str:
    return "no verdict" if attempt.verdict is None else str(attempt.verdict["cause"])


def _read(path: Path, check: Check) -> dict[str, Any] | None:
    try:
        return dict(read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        check.faults.append(f"{path}: {error}")
        return None


def _lines(path: Path) -> list[bytes]:
    try:
        return [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except FileNotFoundError:
        return []
