"""What the controller says about the nodes."""

from __future__ import annotations

from collections.abc import Sequence

from devcluster.daemons import node_process
from devcluster.layout import Layout
from devcluster.processes import recorded
from devcluster.shell import ClusterError, tail, wait_until
from devcluster.state import slurm

WORKING = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
READY_SECONDS = 60


def states(layout: Layout) -> dict[str, str]:
    """State of each node as sinfo writes it; a trailing * means that the node does not answer."""
    lines = slurm(layout, "sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T").splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


def _put_to_work(layout: Layout, node: str) -> None:
    """Resume a node. One that registered since it was looked at works again by itself, and Slurm refuses the order."""
    try:
        slurm(layout, "scontrol", "update", f"nodename={node}", "state=resume")
    except ClusterError as error:
        if "Invalid node state" not in str(error):
            raise


def wait_working(layout: Layout, nodes: Sequence[str], timeout_seconds: float = READY_SECONDS) -> None:
    """Returns when the controller would give jobs to all of `nodes`.

    A node that the controller gave up, or that somebody drained, is put back to work: whoever waits wants it.
    """

    def all_work() -> bool:
        found = states(layout)
        lost = [node for node in nodes if found.get(node) not in WORKING]
        for node in lost:
            if found.get(node, "").startswith(("drain", "down")):
                _put_to_work(layout, node)
        return not lost

    def all_live() -> bool:
        if dead := [node for node in nodes if recorded(layout, node_process(node)) is None]:
            raise ClusterError(
                f"slurmd of {dead[0]} died; the end of its log:\n{tail(layout.log(node_process(dead[0])))}"
            )
        return True

    log = layout.log("slurmctld")
    wait_until(f"nodes {','.join(nodes)} did not become ready", all_work, timeout_seconds, log, all_live)
