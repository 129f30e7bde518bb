"""Is it healthy? Daemons, cables and nodes in one answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from devcluster import daemons, network, nodes, processes
from devcluster.layout import Layout
from devcluster.shell import ClusterError
from devcluster.state import State, load_state, slurm


@dataclass(frozen=True)
class Status:
    """The state of a cluster in words for people and keys for programs."""

    home: str
    slurm_conf: str
    state: State | None
    version: str = ""
    daemons: dict[str, str] = field(default_factory=dict)
    """running, stopped (by SIGSTOP) or dead, by name."""
    nodes: dict[str, str] = field(default_factory=dict)
    """sinfo's word, or `unknown` when the controller does not answer."""
    cut: tuple[str, ...] = ()
    """Nodes without a cable."""

    @property
    def healthy(self) -> bool:
        """Whether every part works."""
        working = all(found in nodes.WORKING for found in self.nodes.values())
        return self.state is not None and working and not self.cut and set(self.daemons.values()) == {"running"}

    def to_json(self) -> dict[str, Any]:
        """Everything, for --json."""
        return {
            "home": self.home,
            "slurm_conf": self.slurm_conf,
            "up": self.state is not None,
            "healthy": self.healthy,
            "version": self.version,
            "daemons": self.daemons,
            "nodes": self.nodes,
            "cut": list(self.cut),
            "settings": self.state.settings.to_json() if self.state else None,
        }

    def to_text(self) -> str:
        """A table for people."""
        if self.state is None:
            return f"no cluster is up at {self.home}"
        lines = [f"{self.version} at {self.home}: {'healthy' if self.healthy else 'NOT healthy'}"]
        lines += [f"  {name:<20} {found}" for name, found in self.daemons.items() if not name.startswith("slurmd-")]
        for number, (node, found) in enumerate(self.nodes.items(), start=1):
            slurmd = self.daemons[daemons.node_process(node)]
            cable = "cable cut" if node in self.cut else ""
            lines.append(f"  {node:<20} {found:<12} {self.state.address(number):<14} slurmd {slurmd} {cable}".rstrip())
        return "\n".join(lines)


def status(layout: Layout) -> Status:
    """Looks at everything; takes at most some seconds even when the controller hangs."""
    state = load_state(layout)
    if state is None:
        return Status(str(layout.home), str(layout.slurm_conf), None)
    names = [*daemons.core_processes(state), *(daemons.node_process(node) for node in state.nodes)]
    daemon_states = {name: _process_state(layout, name) for name in names}
    answers = daemon_states["slurmctld"] == "running"
    links = network.links(layout)
    return Status(
        home=str(layout.home),
        slurm_conf=str(layout.slurm_conf),
        state=state,
        version=slurm(layout, "sinfo", "--version").strip(),
        daemons=daemon_states,
        nodes={**dict.fromkeys(state.nodes, "unknown"), **(_node_states(layout) if answers else {})},
        cut=tuple(node for node in state.nodes if not links.get(layout.link(state.number(node)), False)),
    )


def _process_state(layout: Layout, name: str) -> str:
    process = processes.recorded(layout, name)
    if process is None:
        return "dead"
    return "stopped" if processes.is_stopped(process) else "running"


def _node_states(layout: Layout) -> dict[str, str]:
    try:
        return nodes.states(layout)
    except ClusterError:
        return {}
