"""Metrics of a run: one JSON line each in metrics.jsonl, which is the truth; other sinks are projections of it.

    {"attempt": 1, "time": 1767225600.5, "step": 50, "samples": 6400, "loss": 0.4312, "lr": 0.004}

JSON has no NaN and no infinities: they are written as the texts "NaN", "Infinity" and "-Infinity", which float() reads
back, so that a diverged loss stays visible and every line stays valid. Trouble with a disk or a sink is said once on
standard error, counted, and never stops training.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from .ranks import Ranks
from .runfolder import RunFolder
from .telling import tell


class Sink(Protocol):
    """A further place that metrics go to. Both methods return quickly, or within a bound that the sink states."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one record, with attempt, time, step and samples in it."""

    def finish(self, exit_code: int) -> None:
        """No more records come; the attempt ends with this exit code."""


class Metrics:
    """The metrics of one attempt. Only rank 0 writes; on other ranks every call does nothing.

    Once a newer attempt of the run has begun, nothing is written any more, and `ask_to_stop` is told why.
    """

    def __init__(
        self,
        folder: RunFolder,
        ranks: Ranks,
        attempt: int,
        sinks: list[Sink],
        ask_to_stop: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._folder, self._path = folder, folder.metrics
        self._attempt, self._ask_to_stop = attempt, ask_to_stop
        self._next = folder.attempt(attempt + 1).path
        self._sinks = sinks if ranks.rank == 0 else []
        self._writes = ranks.rank == 0
        self._descriptor: int | None = None
        self._line_open = False
        self.lost: dict[str, int] = {}
        """Records that did not reach a place, by the place's name."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, which holds `step` and `samples`; attempt and time are added.

        Values are numbers, texts, lists or mappings; a tensor or array of one element counts as its number. Trouble
        with a disk or a sink never raises.
        """
        if not self._writes:
            return
        assert "step" in record and "samples" in record, "a metric without step and samples has no place on an axis"
        if self._next.exists() and (newer := self._folder.newer_attempt(self._attempt)) is not None:
            self._sinks = []  # the newer one goes on with the same run of theirs
            self._ask_to_stop(f"attempt {newer} has begun")
            return
        whole = {"attempt": self._attempt, "time": time.time(), **record}
        try:
            self._append(_line(whole))
        except OSError as error:
            self._report(str(self._path), error)
        for sink in self._sinks:
            try:
                sink.log(whole)
            except Exception as error:  # noqa: BLE001 - foreign code; it must not stop training
                self._report(type(sink).__name__, error)

    def close(self, exit_code: int) -> None:
        """Make the file durable, end the sinks, and say what was lost. A second call does nothing."""
        if not self._writes:
            return
        self._writes = False
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                self._report(str(self._path), error)
            os.close(self._descriptor)
        for sink in self._sinks:
            try:
                sink.finish(exit_code)
            except Exception as error:  # noqa: BLE001 - foreign code; it must not change how training ended
                self._report(type(sink).__name__, error)
        for place, count in self.lost.items():
            tell(f"metrics: {count} times a record did not reach {place}")

    def _append(self, line: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            end = os.lseek(self._descriptor, 0, os.SEEK_END)
            # A killed attempt may have left half a line: it must not swallow ours.
            self._line_open = end > 0 and os.pread(self._descriptor, 1, end - 1) != b"\n"
        if self._line_open:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._line_open = written < len(line)
        if self._line_open:
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def _report(self, place: str, error: Exception) -> None:
        if place not in self.lost:
            tell(f"metrics: {place}: {type(error).__name__}: {error}; training goes on, this is said once")
        self.lost[place] = self.lost.get(place, 0) + 1


def records(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The records of one kind in a metrics file, in its order. A torn line, or no file, counts as none."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("kind") == kind:
            yield record


def _number(value: Any) -> Any:
    """A tensor's or an array's only element; the text of anything else that JSON does not know."""
    if hasattr(value, "item"):
        try:
            return value.item()
        except (ValueError, RuntimeError):  # more than one element
            return str(value)
    return str(value)


_encode = json.JSONEncoder(allow_nan=False, default=_number, separators=(", ", ": ")).encode


def _line(record: dict[str, Any]) -> bytes:
    try:
        return _encode(record).encode() + b"\n"
    except ValueError:  # a number that JSON does not have
        return _encode(_finite(record)).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        return _finite(_number(value))
    return value
