"""The metrics of a run: each step that had to be logged is there once, with the figures that the spec makes.

After a resume the lines of older attempts beyond the step that was resumed from are superseded: those steps were taken
again. What is left is the history that counts, and it alone is held to this.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .attempts import Attempt
from .report import Check, count, ranges


@dataclass(frozen=True)
class Line:
    """A training or evaluation line."""

    number: int
    """In the file, from 1."""
    attempt: int
    kind: str
    step: int
    samples: int
    lr: float | None


def read(path: Path, check: Check) -> list[Line]:
    """The lines of metrics.jsonl. Half lines of killed attempts are noted; what is no record is a fault."""
    lines, torn, events = [], 0, Counter[str]()
    for number, text in _texts(path):
        try:
            record = json.loads(text)
        except ValueError:
            torn += 1
            continue
        try:
            if record["kind"] in ("train", "eval"):
                lines.append(_line(number, record))
            elif record["kind"] == "health":
                events[str(record["event"])] += 1
        except (KeyError, TypeError, ValueError) as error:
            check.faults.append(f"{path}:{number}: no record of a step: {type(error).__name__}: {error}")
    if torn:
        check.notes.append(f"{count(torn, 'half line')} of a process that was killed while it wrote")
    check.notes += [f"health: {event}, {count(times, 'time')}" for event, times in sorted(events.items())]
    return lines


def examine(check: Check, path: Path, lines: list[Line], attempts: list[Attempt], saved: int) -> None:
    """Add to `check` whether the lines are those of one unbroken run. Attempts know their steps when it returns.

    `saved`: step of the newest checkpoint, or 0.
    """
    of = {attempt.number: attempt for attempt in attempts}
    for line in lines:
        if line.kind == "train" and line.attempt in of:
            of[line.attempt].steps.append(line.step)
    known = [attempt for attempt in attempts if attempt.began is not None]
    for number in sorted({line.attempt for line in lines} - {attempt.number for attempt in known}):
        check.notes.append(f"attempt {number} left no began.json: its lines are not checked")
    bounds = _bounds(known)
    counted = [line for line in lines if line.attempt in bounds and line.step <= bounds[line.attempt]]
    check.faults += [*_doubles(path, counted), *_late(path, lines), *_figures(path, counted, of)]
    for attempt in known:
        own = sorted(line.step for line in counted if line.kind == "train" and line.attempt == attempt.number)
        check.faults += _gaps(path, attempt, own, bounds[attempt.number], saved)
    steps = sorted({line.step for line in counted if line.kind == "train"})
    if not steps:
        return
    check.text = (
        f"{count(len(steps), 'training line')} up to step {steps[-1]:,}, no gap and no double; "
        "samples and rates are the spec's"
    )
    if superseded := sum(line.attempt in bounds for line in lines) - len(counted):
        check.text += f"; {superseded:,} more superseded by later attempts"


def _bounds(attempts: list[Attempt]) -> dict[int, float]:
    """For each attempt the last step of its that counts: those beyond were taken again by a later one."""
    bounds, last = {}, float("inf")
    for attempt in reversed(attempts):
        assert attempt.began is not None
        bounds[attempt.number] = last
        last = min(last, attempt.began.step)
    return bounds


def _doubles(path: Path, lines: list[Line]) -> list[str]:
    seen = Counter((line.kind, line.step) for line in lines)
    last = {(line.kind, line.step): line.number for line in lines}
    what = {"train": "step", "eval": "the evaluation at step"}
    return [
        f"{path}:{last[kind, step]}: {what[kind]} {step:,} is there {times} times"
        for (kind, step), times in seen.items()
        if times > 1
    ]


def _gaps(path: Path, attempt: Attempt, own: list[int], bound: float, saved: int) -> list[str]:
    """Steps that had to be logged and are not, the last attempt's up to `saved`; and lines that nothing asked for."""
    assert attempt.began is not None
    first, every, total = attempt.began.step, attempt.began.log_every_steps, attempt.began.total_steps
    end = int(bound) if bound != float("inf") else max([first, saved, *own])
    due = set(range(first // every * every + every, end + 1, every)) | ({total} if first < total <= end else set())
    faults = []
    if missing := sorted(due - set(own)):
        steps = "step" if len(missing) == 1 else "steps"
        faults.append(f"{path}: {steps} {ranges(missing)} of attempt {attempt.number} missing")
    regular = max(due & set(own), default=first)
    if odd := [step for step in own if step not in due and step < regular]:
        faults.append(f"{path}: attempt {attempt.number} logged step {ranges(odd)}, which was not due")
    return faults


def _late(path: Path, lines: list[Line]) -> list[str]:
    """Lines that an attempt wrote after a newer one had begun to."""
    faults, newest = [], 0
    for line in lines:
        if line.attempt < newest:
            faults.append(f"{path}:{line.number}: attempt {line.attempt} wrote after attempt {newest} had begun")
        newest = max(newest, line.attempt)
    return faults


def _figures(path: Path, lines: list[Line], attempts: dict[int, Attempt]) -> Iterator[str]:
    """Samples and learning rate of each line against the arithmetic of its attempt, which is exact."""
    for line in lines:
        began, where = attempts[line.attempt].began, f"{path}:{line.number}"
        assert began is not None
        if line.step < began.step:
            yield f"{where}: step {line.step:,} is before step {began.step:,}, where attempt {line.attempt} began"
            continue
        if (due := began.consumed(line.step)) != line.samples:
            yield f"{where}: {line.samples:,} samples at step {line.step:,}, but {due:,} are due"
        if line.kind == "train" and line.lr != (rate := began.rate(line.step)):
            yield f"{where}: lr {line.lr} at step {line.step:,}, the spec makes it {rate}"


def _line(number: int, record: dict[str, Any]) -> Line:
    lr = record.get("lr")
    return Line(
        number,
        int(record["attempt"]),
        str(record["kind"]),
        int(record["step"]),
        int(record["samples"]),
        None if lr is None else float(lr),
    )


def _texts(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as source:
            for number, text in enumerate(source, 1):
                if text.strip():
                    yield number, text
    except FileNotFoundError:
        return
