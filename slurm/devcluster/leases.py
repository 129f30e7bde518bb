"""Who uses the cluster, so that the last test session to end takes it down and no earlier one does.

A person's `up` keeps the cluster until `down`. A test session takes a lease in the name of its process instead, and a
lease of a process that died counts for nothing.
"""

from __future__ import annotations

from devcluster import processes
from devcluster.layout import Layout

FOR_GOOD = "for-good"


def take(layout: Layout, pid: int | None) -> None:
    """Notes a user: a process, or with None a person, who keeps the cluster for good."""
    layout.leases.mkdir(exist_ok=True)
    if pid is None:
        (layout.leases / FOR_GOOD).touch()
    else:
        processes.record(layout.leases / str(pid), pid)


def give_back(layout: Layout, pid: int) -> bool:
    """Ends a process's lease; whether that was the last one."""
    (layout.leases / str(pid)).unlink(missing_ok=True)
    left = list(layout.leases.iterdir()) if layout.leases.exists() else []
    return not any(lease.name == FOR_GOOD or processes.read_record(lease) for lease in left)
