"""Starting daemons and ending exactly those: a process is known by number, start time and a mark that we gave it.

A number alone may belong to somebody else by the time it is used. So each daemon is started with DDP_CLUSTER_DAEMON in
its environment, its start time is recorded, and signals go through a pidfd, which the kernel never hands to another
process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from devcluster.layout import Layout
from devcluster.shell import ClusterError, wait_until

MARK = "DDP_CLUSTER_DAEMON"
DAEMON_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Process:
    """A process that we started, and that can be told from a later one with the same number."""

    pid: int
    start_ticks: int


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in ticks since boot) of a process, or None when it is gone."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return rest[0], int(rest[19])


def _is_marked(pid: int, home: Path) -> bool:
    """Whether a process was started as a daemon of this cluster; an ordinary user who may not look gets the benefit."""
    try:
        return f"{MARK}={home}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError:
        return os.geteuid() != 0
    except OSError:
        return False


def spawn(layout: Layout, name: str, command: list[str], user: str | None = None, **environment: str) -> Process:
    """Starts a daemon in the background, with its output in its log, and records it."""
    variables = {"PATH": DAEMON_PATH, "LC_ALL": "C.UTF-8", MARK: str(layout.home), **environment}
    with layout.log(name).open("ab") as log:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=variables,
            user=user,
            group=user,
            extra_groups=[] if user else None,
            start_new_session=True,
        )
    popen.returncode = 0  # it outlives us on purpose; without this Python warns about it
    found = _stat(popen.pid)
    if found is None:
        raise ClusterError(f"{name} ended at once")
    process = Process(popen.pid, found[1])
    (layout.pids / name).write_text(f"{process.pid} {process.start_ticks}\n")
    return process


def recorded(layout: Layout, name: str) -> Process | None:
    """The daemon of this name if it still runs."""
    try:
        pid, start_ticks = (int(word) for word in (layout.pids / name).read_text().split())
    except (OSError, ValueError):
        return None
    process = Process(pid, start_ticks)
    return process if _runs(process) and _is_marked(pid, layout.home) else None


def _runs(process: Process) -> bool:
    found = _stat(process.pid)
    return found is not None and found[1] == process.start_ticks and found[0] not in "ZX"


def is_stopped(process: Process) -> bool:
    """Whether somebody holds it with SIGSTOP."""
    found = _stat(process.pid)
    return found is not None and found[0] in "Tt"


def send(process: Process, signal_number: signal.Signals) -> None:
    """Signals this process and no other; nothing happens when it is gone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if _runs(process):
            signal.pidfd_send_signal(descriptor, signal_number)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def end(processes: Callable[[], Iterable[Process]], what: str, timeout_seconds: float = 15) -> None:
    """Kills what `processes` finds until it finds nothing: a dying process may still have started another."""
    deadline = time.monotonic() + timeout_seconds
    while found := list(processes()):
        if time.monotonic() > deadline:
            numbers = ", ".join(str(process.pid) for process in found)
            raise ClusterError(f"{what}: processes {numbers} do not die of SIGKILL")
        for process in found:
            send(process, signal.SIGKILL)
        time.sleep(0.02)


def _all_running() -> Iterable[Process]:
    for entry in os.listdir("/proc"):  # noqa: PTH208 - a path object each would make this slow on a busy machine
        if entry.isdigit() and (found := _stat(int(entry))) and found[0] not in "ZX":
            yield Process(int(entry), found[1])


def daemons_of(layout: Layout) -> list[Process]:
    """Every process that carries this cluster's mark, recorded or not."""
    return [process for process in _all_running() if _is_marked(process.pid, layout.home)]


def inside_namespace(namespace: str) -> list[Process]:
    """Every process in a network namespace: a node's slurmd, its steps, and whatever the jobs left running."""
    try:
        wanted = os.stat(f"/run/netns/{namespace}")  # noqa: PTH116
    except FileNotFoundError:
        return []
    return [process for process in _all_running() if _network_of(process.pid) == (wanted.st_dev, wanted.st_ino)]


def _network_of(pid: int) -> tuple[int, int] | None:
    try:
        found = os.stat(f"/proc/{pid}/ns/net")  # noqa: PTH116
    except OSError:
        return None
    return found.st_dev, found.st_ino


def wait_gone(process: Process, what: str, timeout_seconds: float = 30) -> None:
    """Waits until a process that was asked to end has ended."""
    wait_until(f"{what} does not end", lambda: not _runs(process), timeout_seconds)
