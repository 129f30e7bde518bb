"""Starting daemons and ending exactly those.

A process number alone may belong to somebody else by the time it is used. So a daemon is recorded with its start time
and the machine's boot, which together never come twice, and signals go through a pidfd, which the kernel never hands to
another process. For the case that the record is lost, each daemon carries DDP_CLUSTER_DAEMON in its environment.
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
    """Whether a process carries this cluster's mark; for a moment during exec no process shows any environment."""
    try:
        return f"{MARK}={home}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


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
    return record(layout.pids / name, popen.pid)


def record(file: Path, pid: int) -> Process:
    """Writes down which process this is, so that `read_record` knows it again."""
    found = _stat(pid)
    if found is None:
        raise ClusterError(f"there is no process {pid} (any more) to record in {file}")
    file.write_text(f"{pid} {found[1]} {_boot_id()}\n")
    return Process(pid, found[1])


def recorded(layout: Layout, name: str) -> Process | None:
    """The daemon of this name if it still runs."""
    return read_record(layout.pids / name)


def read_record(file: Path) -> Process | None:
    """The recorded process if it still runs."""
    try:
        pid, start_ticks, boot_id = file.read_text().split()
    except (OSError, ValueError):
        return None
    process = Process(int(pid), int(start_ticks))
    return process if boot_id == _boot_id() and _runs(process) else None


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


def daemons_of(layout: Layout) -> set[Process]:
    """Every daemon of this cluster: those recorded, and any other process that carries its mark."""
    names = [file.name for file in layout.pids.iterdir()] if layout.pids.exists() else []
    known = {process for name in names if (process := recorded(layout, name))}
    return known | {process for process in _all_running() if _is_marked(process.pid, layout.home)}


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
