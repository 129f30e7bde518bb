"""What the controller says about the nodes."""

from __future__ import annotations

from devcluster.layout import Layout
from devcluster.shell import wait_until
from devcluster.state import State, slurm

WORKING = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
READY_SECONDS = 60


def states(layout: Layout) -> dict[str, str]:
    """State of each node as sinfo writes it; a trailing * means that the node does not answer."""
    lines = slurm(layout, "sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T").splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


def not_working(layout: Layout, state: State) -> list[str]:
    """Nodes that would take no job now."""
    found = states(layout)
    return [node for node in state.nodes if found.get(node, "unknown") not in WORKING]


def wait_working(layout: Layout, state: State, nodes: tuple[str, ...], timeout_seconds: float = READY_SECONDS) -> None:
    """Returns when the controller has heard of all `nodes`."""

    def all_work() -> bool:
        lost = set(not_working(layout, state)) & set(nodes)
        drained = [
            node for node, found in states(layout).items() if node in lost and found.startswith(("drain", "down"))
        ]
        for node in drained:
            slurm(layout, "scontrol", "update", f"nodename={node}", "state=resume")
        return not lost

    log = layout.log(f"slurmd-{nodes[0]}" if len(nodes) == 1 else "slurmctld")
    wait_until(f"nodes {','.join(nodes)} did not become ready", all_work, timeout_seconds, log)
