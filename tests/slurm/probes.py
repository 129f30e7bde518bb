"""What the cluster's tests look at: its status, its processes, and how long things take."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.clusterfix import call

PREFIX = f"t{os.getpid()}n"
HOME = Path(f"/var/tmp/ddp-cluster-test-{os.getpid()}")
OPTIONS = ("--nodes=3", f"--node-prefix={PREFIX}", "--grace-time=3", "--slurmd-timeout=10", "--requeue-delay=5")


def status(home: Path = HOME) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(home, "status", "--json").stdout)
    return found


def wait(what: str, condition: Callable[[], bool], timeout_seconds: float = 30) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_seconds:g} s"
        time.sleep(0.2)


def daemon_pids(home: Path = HOME) -> dict[str, int]:
    return {file.name: int(file.read_text().split()[0]) for file in (home / "pids").iterdir()}


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
