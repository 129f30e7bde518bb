"""What the controller says about the nodes."""

from __future__ import annotations

from collections.abc import Sequence

from devcluster.layout import Layout
from devcluster.shell import wait_until
from devcluster.state import slurm

WORKING = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
READY_SECONDS = 10


def states(layout: Layout) -> dict[str, str]:
    """State of each node as sinfo writes it; a trailing * means that the node does not answer."""
    lines = slurm(layout, "sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T").splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


def wait_working(layout: Layout, nodes: Sequence[str], timeout_seconds: float = READY_SECONDS) -> None:
    """Returns when the controller would give jobs to all of `nodes`.

    A node that the controller gave up, or that somebody drained, is put back to work: whoever waits wants it.
    """

    def all_work() -> bool:
        found = states(layout)
        lost = [node for node in nodes if found.get(node) not in WORKING]
        if given_up := [node for node in lost if found.get(node, "").startswith(("drain", "down"))]:
            slurm(layout, "scontrol", "update", f"nodename={','.join(given_up)}", "state=resume")
        return not lost

    log = layout.log(f"slurmd-{nodes[0]}" if len(nodes) == 1 else "slurmctld")
    wait_until(f"nodes {','.join(nodes)} did not become ready", all_work, timeout_seconds, log)
