"""The end of an attempt: its verdict, from the exit code and the ranks' own records, written and said once."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from training.runfolder import AttemptFolder, RunFolder, append_json, read_json, write_json

from . import restart
from .errors import BAD_SPEC, DO_NOT_RESTART, DONE, JOB_FAILED, TERMINATED
from .processes import is_running

Cause = Literal["done", "stopped", "failed", "hang", "killed", "superseded"]
"""stopped: cleanly, because it was asked to; hang: nothing moved, which its ranks noticed themselves; killed: with its
host process or batch script, before it could say; superseded: a newer attempt had begun while it still ran."""
_ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|remote process exited|nccl communicator was aborted"
    r"|unhandled system error|socketstatus|store->get",
    re.IGNORECASE,
)
"""How torch words the loss of a peer in a collective."""
_CAUSES: dict[str, Cause] = {"Hang": "hang", "Superseded": "superseded"}
"""Of failures that are a cause of their own, by the failure's name."""


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended."""

    attempt: int
    cause: Cause
    exit_code: int
    """0, 143 after a clean stop, 2 for a fault of the user's configuration, 93 when it was superseded, else 5."""
    rank: int | None = None
    """The rank that failed first, with its host and exception."""
    host: str | None = None
    text: str | None = None
    log: str | None = None

    def lines(self) -> list[str]:
        """What the terminal says."""
        if self.cause == "done":
            return []
        if self.cause == "killed":
            return [f"attempt {self.attempt} was killed before it could say why"]
        if self.cause == "stopped":
            return [f"attempt {self.attempt} stopped, as it was asked to: {self.text}"]
        if self.cause == "superseded":
            return [f"attempt {self.attempt} gave way: {self.text}"]
        if self.rank is None:
            return [f"attempt {self.attempt} ended before any rank came to its end or said why; see {self.log}"]
        first, *rest = (self.text or "").splitlines() or [""]
        how = "hung" if self.cause == "hang" else "failed"
        return [
            f"attempt {self.attempt} {how}: rank {self.rank} on {self.host}: {first}",
            *rest[:20],
            f"its log: {self.log}",
        ]


def finish(
    folder: RunFolder, attempt: AttemptFolder, code: int, *, started: float, job: str, nodes: str = ""
) -> Verdict:
    """Write the attempt's verdict and its line in attempts.jsonl, and say it.

    `code` is srun's exit code, or that of the first rank that left with one.
    """
    verdict = judge(folder, attempt, code)
    _write(folder, attempt, verdict, started=started, end=time.time(), job=job, nodes=nodes)
    for text in verdict.lines():
        print(f"launch: {text}", file=sys.stderr, flush=True)
    return verdict


def close_earlier(folder: RunFolder, attempt: AttemptFolder) -> None:
    """Give earlier attempts that were killed with their batch script or host process the verdict that they lack."""
    for number in range(1, attempt.number):
        earlier = folder.attempt(number)
        if earlier.path.exists() and not earlier.result.exists() and not _runs_here(earlier):
            close(folder, earlier)


def _runs_here(attempt: AttemptFolder) -> bool:
    """A local attempt whose host process is alive gives way by itself, and says so."""
    try:
        return is_running(int(read_json(attempt.path / "host.json")["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def close(folder: RunFolder, attempt: AttemptFolder) -> Verdict:
    """The verdict of an attempt whose own end could not write one: from what its ranks left, else `killed`."""
    known = attempt.stopped.exists() or attempt.failures()
    verdict = judge(folder, attempt, JOB_FAILED) if known else Verdict(attempt.number, "killed", JOB_FAILED)
    times = [path.stat().st_mtime for path in attempt.path.iterdir()] or [attempt.path.stat().st_mtime]
    _write(folder, attempt, verdict, started=min(times), end=max(times), job="", nodes="")
    return verdict


def _how_it_stopped(attempt: AttemptFolder) -> str:
    record = read_json(attempt.stopped)
    step = record.get("step")
    if step == 0:
        return "before its first step"
    return f"it saved at step {step}" if step is not None else str(record.get("reason") or "nothing was saved")


def _write(
    folder: RunFolder, attempt: AttemptFolder, verdict: Verdict, *, started: float, end: float, job: str, nodes: str
) -> None:
    """Trouble is said, and the verdict stands all the same: the disk may be full.

    An attempt that a newer one took for dead has its verdict already, and keeps it.
    """
    if attempt.result.exists():
        return
    try:
        _record(folder, attempt, verdict, started=started, end=end, job=job, nodes=nodes)
    except OSError as error:
        print(f"launch: {error.filename or attempt.path}: {error.strerror}: the verdict could not be written")


def _record(
    folder: RunFolder, attempt: AttemptFolder, verdict: Verdict, *, started: float, end: float, job: str, nodes: str
) -> None:
    write_json(attempt.result, asdict(verdict))
    first_step, last_step = _steps(folder, attempt.number)
    line = {
        "attempt": attempt.number,
        "job": job,
        "nodes": nodes,
        "start": started,
        "end": end,
        "cause": verdict.cause,
        "exit_code": verdict.exit_code,
        "first_step": first_step,
        "last_step": last_step,
    }
    append_json(folder.attempts_jsonl, line)


def judge(folder: RunFolder, attempt: AttemptFolder, code: int) -> Verdict:
    """The verdict from an exit code and the failure records; the earliest record is the cause, later ones follow it."""
    failures = attempt.failures()
    if code == DONE and not failures and attempt.finished.exists():
        return Verdict(attempt.number, "done", DONE)
    if attempt.stopped.exists() and not failures:
        return Verdict(attempt.number, "stopped", TERMINATED, text=_how_it_stopped(attempt))
    if not failures:
        return Verdict(attempt.number, "failed", JOB_FAILED, log=str(_telling_log(folder, attempt)))
    first = _root_cause(failures)
    exit_code = BAD_SPEC if first["exit_code"] == BAD_SPEC and first["exception"] == "ConfigError" else JOB_FAILED
    log = attempt.rank_log(int(first["rank"]))
    cause = _CAUSES.get(first["exception"], "failed")
    if cause == "superseded":
        exit_code = DO_NOT_RESTART
    if cause == "hang" and attempt.stacks(int(first["rank"])).exists():
        log = attempt.stacks(int(first["rank"]))
    return Verdict(attempt.number, cause, exit_code, first["rank"], first["host"], first["text"], str(log))


def read_verdict(attempt: AttemptFolder) -> Verdict | None:
    """The verdict of an attempt that has one."""
    try:
        return Verdict(**read_json(attempt.result))
    except FileNotFoundError:
        return None


def main(arguments: list[str], env: Mapping[str, str]) -> int:
    """`finish RUN ATTEMPT CODE STARTED`, at the end of the batch script; returns the exit code of the job."""
    run, number, code, started = arguments
    folder = RunFolder(Path(run))
    job = env.get("SLURM_JOB_ID", "")
    nodes = env.get("SLURM_JOB_NODELIST", "")
    verdict = finish(folder, folder.attempt(int(number)), int(code), started=float(started), job=job, nodes=nodes)
    restart.after(folder, verdict.cause, job)
    return verdict.exit_code


def _root_cause(failures: list[dict[str, Any]]) -> dict[str, Any]:
    """The earliest failure that is not the mere echo of another rank's: a collective that lost its peer fails too."""
    return min(failures, key=lambda failure: (is_echo(failure["text"]), failure["time"]))


def is_echo(text: str) -> bool:
    """Whether a failure reads like what the end of another rank does to one in a collective."""
    return _ECHO.search(text) is not None


def _telling_log(folder: RunFolder, attempt: AttemptFolder) -> Path:
    """The log to look at when no rank wrote a record: the first rank's that is not empty, else the batch script's."""
    logs = [log for log in sorted(attempt.path.glob("rank-*.log")) if log.stat().st_size]
    batch = sorted(folder.attempts.glob("slurm-*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next(iter([*logs, *batch]), attempt.path)


def _steps(folder: RunFolder, attempt: int) -> tuple[int | None, int | None]:
    """First and last optimizer step that the attempt wrote to metrics.jsonl."""
    steps: list[int] = []
    try:
        with folder.metrics.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if f'"attempt": {attempt},' in line or f'"attempt":{attempt},' in line:
                    steps.append(int(json.loads(line)["step"]))
    except (FileNotFoundError, ValueError, KeyError):
        return (steps[0], steps[-1]) if steps else (None, None)
    return (steps[0], steps[-1]) if steps else (None, None)
