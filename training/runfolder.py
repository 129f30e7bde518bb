"""Every name inside a run folder, in one place. Free of torch: the launcher writes here what the ranks read.

runs/<run-id>/
  spec.yaml             resolved spec, what really runs
  source.yaml           the spec file as the user wrote it; overrides.json beside it
  run.json              run id, submit token, working folder, code and environment fingerprint
  attempts.jsonl        one line for each attempt that ended
  attempts/0001/        rank-0000.log, env-0000.json, failure-0000.json, lost-0000.json, stacks-rank-0000.txt,
                        result.json
  metrics.jsonl         the truth about metrics
  checkpoints/          step-000001200/ ...
  submitit/             submitit's own files
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_FOLDER_VARIABLE = "DDP_RUN_FOLDER"
ATTEMPT_VARIABLE = "DDP_ATTEMPT"
MAX_TEXT = 8000
"""Longest text in a record."""


@dataclass(frozen=True)
class AttemptFolder:
    """One attempt's files. Numbers start at 1."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    def rank_log(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.log"

    def failure(self, rank: int) -> Path:
        """What a rank wrote about its own end when it failed."""
        return self.path / f"failure-{rank:04d}.json"

    def lost(self, rank: int) -> Path:
        """What another rank saw of the end of a rank that could not write a record of its own."""
        return self.path / f"lost-{rank:04d}.json"

    def stacks(self, rank: int) -> Path:
        """What each thread of a rank that hung was doing. Empty, then gone, as long as the rank is well."""
        return self.path / f"stacks-rank-{rank:04d}.txt"

    @property
    def hang(self) -> Path:
        """Made by the first rank that found itself hanging; others that are silent too then need not wait longer."""
        return self.path / "hang"

    def environment(self, rank: int) -> Path:
        """The rendezvous variables that a rank saw; no other variable is written."""
        return self.path / f"env-{rank:04d}.json"

    @property
    def began(self) -> Path:
        """Written by rank 0 before the first step: where the attempt goes on from, and with how many ranks."""
        return self.path / "began.json"

    @property
    def finished(self) -> Path:
        """Written by rank 0 when its payload came to its end: exit code 0 alone may be a process that just left."""
        return self.path / "finished.json"

    @property
    def stopped(self) -> Path:
        """Written by rank 0 when the ranks stopped cleanly because they were asked to."""
        return self.path / "stopped.json"

    @property
    def result(self) -> Path:
        """The attempt's verdict: exit code, cause, and the first failing rank."""
        return self.path / "result.json"

    def failures(self) -> list[dict[str, Any]]:
        """Failure records, the earliest first: each failed rank's own, else what others saw of its end."""
        own = [read_json(path) for path in sorted(self.path.glob("failure-*.json"))]
        known = {record["rank"] for record in own}
        seen = [read_json(path) for path in sorted(self.path.glob("lost-*.json"))]
        records = own + [record for record in seen if record["rank"] not in known]
        return sorted(records, key=lambda record: float(record["time"]))


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, private to its owner (0700)."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def spec(self) -> Path:
        return self.path / "spec.yaml"

    @property
    def source(self) -> Path:
        return self.path / "source.yaml"

    @property
    def overrides(self) -> Path:
        return self.path / "overrides.json"

    @property
    def spec_before(self) -> Path:
        """The spec before the last `launch resume` that changed it."""
        return self.path / "spec-before.yaml"

    @property
    def resumes_jsonl(self) -> Path:
        """A line for each `launch resume` that changed the spec."""
        return self.path / "resumes.jsonl"

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def attempts_jsonl(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def wandb_id(self) -> Path:
        return self.path / "wandb-id"

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.attempts / f"{number:04d}")

    def last_attempt(self, after: int = 0) -> AttemptFolder | None:
        """The newest attempt, or None before the first."""
        return self.attempt(numbers[-1]) if (numbers := self.attempt_numbers(after)) else None

    def attempt_numbers(self, after: int = 0) -> list[int]:
        """The numbers of all attempts later than `after`, in their order."""
        return sorted(n for n in (int(p.name) for p in self.attempts.glob("[0-9]*") if p.name.isdigit()) if n > after)

    def newer_attempt(self, than: int) -> int | None:
        """The number of the newest attempt, if one began after attempt `than`."""
        newest = self.last_attempt(than) if self.attempt(than + 1).path.exists() else None
        return newest.number if newest is not None else None

    def take_attempt(self) -> AttemptFolder:
        """Take the next attempt number by an exclusive create, so that two takers never share one."""
        self.attempts.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = max(self.attempt_numbers(), default=0) + 1
        while True:
            try:
                self.attempt(number).path.mkdir(mode=0o700)
                return self.attempt(number)
            except FileExistsError:
                number += 1


def write_failure(
    path: Path,
    rank: int,
    kind: str,
    message: str,
    *,
    exit_code: int,
    details: str | None = None,
    host: str | None = None,
) -> None:
    """Write the record of a rank's failure. `kind` names it, `details` is a traceback. Errors: OSError."""
    text = f"{kind}: {message}" if message else kind
    record = {
        "time": time.time(),
        "rank": rank,
        "host": host or socket.gethostname(),
        "exception": kind,
        "message": message[:MAX_TEXT],
        "text": text[:MAX_TEXT],
        "details": None if details is None else details[-MAX_TEXT:],
        "exit_code": exit_code,
    }
    write_json(path, record)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one, readable by its owner only."""
    text = json.dumps(value, indent=1) + "\n"  # before the file: a value that is no JSON leaves nothing behind
    staged = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
        staged.rename(path)
    except OSError:
        staged.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Read a JSON file. Errors: OSError, ValueError."""
    return json.loads(path.read_text(encoding="utf-8"))


def append_json(path: Path, value: Any) -> None:
    """Append one line of JSON in a single write, so that lines of several writers do not mix.

    Half a line that a killed writer left at the end stays on a line of its own. Errors: OSError, also when the line
    was written in part.
    """
    line = json.dumps(value).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with contextlib.suppress(OSError):  # file systems without locks: two writers may then leave an empty line
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        end = os.lseek(descriptor, 0, os.SEEK_END)
        if end > 0 and os.pread(descriptor, 1, end - 1) != b"\n":
            line = b"\n" + line
        if (written := os.write(descriptor, line)) < len(line):
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written", str(path))
    finally:
        os.close(descriptor)
