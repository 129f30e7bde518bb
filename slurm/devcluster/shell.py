"""Foreign commands and bounded waits: the only two ways in which this package blocks."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.1


class ClusterError(Exception):
    """Something the user must know: the message says what failed and what to do about it."""


class UnavailableError(ClusterError):
    """This machine cannot host a cluster, whatever the settings: not root, not Debian, no packages, no namespaces."""


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment for a foreign command, without what a surrounding Slurm job or site would inject into it."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SALLOC", "SRUN"))
    }
    return {**kept, "LC_ALL": "C.UTF-8", **extra}


def run(*command: str, stdin: str = "", timeout_seconds: float = 30, environment: dict[str, str] | None = None) -> str:
    """Runs a command and returns its stdout; ClusterError when it fails, is missing or takes too long."""
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            env=clean_environment() if environment is None else environment,
            check=False,
        )
    except FileNotFoundError:
        raise ClusterError(f"{command[0]} is not installed or not on PATH; `up` installs what is missing") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{' '.join(command)!r} did not answer within {timeout_seconds:g} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it printed nothing")[-2000:]
        raise ClusterError(f"{' '.join(command)!r} failed with exit code {done.returncode}: {said}")
    return done.stdout


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, indented, for an error message."""
    try:
        text = log.read_text(errors="replace").splitlines()[-lines:]
    except OSError as error:
        return f"  ({log}: {error.strerror})"
    return "\n".join(f"  {line}" for line in text) or f"  ({log} is empty)"


def wait_until(
    what: str,
    condition: Callable[[], bool],
    timeout_seconds: float,
    log: Path | None = None,
    alive: Callable[[], bool] = lambda: True,
) -> None:
    """Polls until `condition` holds.

    Raises ClusterError with the end of `log` after `timeout_seconds`, or at once when `alive` says that the process
    which should make it true has died.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        died = not alive()
        if died or time.monotonic() > deadline:
            reason = "its process died" if died else f"not within {timeout_seconds:g} s"
            logged = f"; the end of {log}:\n{tail(log)}" if log else ""
            raise ClusterError(f"{what}: {reason}{logged}")
        time.sleep(POLL_SECONDS)


def succeeds(*command: str, timeout_seconds: float = 10, environment: dict[str, str] | None = None) -> bool:
    """Whether a probing command exits 0 in time."""
    try:
        run(*command, timeout_seconds=timeout_seconds, environment=environment)
    except ClusterError:
        return False
    return True
