"""What a running cluster remembers between commands, and the lock that keeps two commands apart."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from devcluster.layout import Layout
from devcluster.settings import Settings
from devcluster.shell import ClusterError, clean_environment, run

FIRST_PORT = 16817  # below every usual ephemeral range, and not 6817.., where the machine's own Slurm would be
PORT_STEP = 10
CONTROLLER_HOST_NUMBER = 254


@dataclass(frozen=True)
class State:
    """One cluster as it was brought up."""

    settings: Settings
    subnet: str
    """First three numbers of the addresses, such as 10.77.0."""
    first_port: int
    """slurmctld; slurmd and slurmdbd have the next two."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes in order."""
        return self.settings.names

    @property
    def controller_address(self) -> str:
        """The machine's own address in the cluster's network."""
        return f"{self.subnet}.{CONTROLLER_HOST_NUMBER}"

    @property
    def addresses(self) -> dict[str, str]:
        """Address of each node."""
        return {node: self.address(number) for number, node in enumerate(self.nodes, start=1)}

    def address(self, number: int) -> str:
        """Address of node number 1, 2..."""
        return f"{self.subnet}.{number}"

    def number(self, node: str) -> int:
        """1 for the first node; ClusterError lists the nodes when there is no such."""
        if node not in self.nodes:
            raise ClusterError(f"no node is called {node!r}; the nodes are {', '.join(self.nodes)}")
        return self.nodes.index(node) + 1


def load_state(layout: Layout) -> State | None:
    """The state that `up` left, or None when there is none that this version understands."""
    try:
        stored = json.loads(layout.state.read_text())
        return State(**{**stored, "settings": Settings.from_json(stored["settings"])})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def save_state(layout: Layout, state: State) -> None:
    """Written beside and renamed, so that a crash leaves the old state or the new one."""
    stored: dict[str, Any] = {**asdict(state), "settings": state.settings.to_json()}
    replace_file(layout.state, json.dumps(stored, indent=1) + "\n")


def require_state(layout: Layout) -> State:
    """The state of a cluster that must be there."""
    state = load_state(layout)
    if state is None:
        raise ClusterError(f"no cluster is up at {layout.home}; `up` starts one")
    return state


def replace_file(path: Path, text: str) -> None:
    """Replaces a file's text at once or not at all."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


def allocate(settings: Settings) -> State:
    """Chooses a free subnet and the ports that belong to it.

    Call it under the machine-wide lock and make the bridge before letting go: the subnet then shows as taken, and with
    it the ports, although nobody listens there yet.
    """
    routes = run("ip", "-4", "route", "show", "table", "all")
    for third in range(256):
        subnet, first_port = f"10.77.{third}", FIRST_PORT + third * PORT_STEP
        if f"{subnet}." not in routes and all(_is_free(first_port + step) for step in range(3)):
            return State(settings, subnet, first_port)
    raise ClusterError("10.77.0.0/16 has no free /24 left whose ports are free too: take an old cluster down")


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextmanager
def exclusive(what: str, timeout_seconds: float = 300) -> Iterator[None]:
    """Holds a machine-wide lock called `what`.

    It is an abstract Unix socket: the kernel frees it when its owner dies, and unlike a lock file it leaves nothing
    behind.
    """
    with closing(socket.socket(socket.AF_UNIX)) as lock:
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                lock.bind(f"\0ddp-cluster:{what}")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise ClusterError(f"another command has held {what} for {timeout_seconds:g} s") from None
                time.sleep(0.1)
        yield


def slurm_environment(layout: Layout) -> dict[str, str]:
    """The environment in which Slurm's commands talk to this cluster."""
    return clean_environment(SLURM_CONF=str(layout.slurm_conf))


def slurm(layout: Layout, *command: str, timeout_seconds: float = 20) -> str:
    """Runs one of Slurm's commands against this cluster."""
    return run(*command, timeout_seconds=timeout_seconds, environment=slurm_environment(layout))
