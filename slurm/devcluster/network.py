"""The cluster's network: a bridge on the machine, and a namespace with a cable to the bridge for each node."""

from __future__ import annotations

import json

from devcluster.layout import Layout
from devcluster.shell import UnavailableError, run, succeeds
from devcluster.state import State


def check_permitted() -> None:
    """Refuses a machine, usually a container, in which even root may not make a namespace."""
    if not succeeds("unshare", "--net", "--uts", "true"):
        raise UnavailableError("root may not make network namespaces here; a container needs --privileged for it")


def create(layout: Layout, state: State) -> None:
    """Makes bridge, namespaces and cables; two `ip` processes and one a node, because each costs time."""
    lines = [
        f"link add {layout.bridge} type bridge",
        f"addr add {state.controller_address}/24 dev {layout.bridge}",
        f"link set {layout.bridge} up",
    ]
    for number, node in enumerate(state.nodes, start=1):
        namespace, link = layout.namespace(node), layout.link(number)
        lines += [
            f"netns add {namespace}",
            f"link add {link} type veth peer name eth0 netns {namespace}",
            f"link set {link} master {layout.bridge} up",
        ]
    _batch(lines)
    for number, node in enumerate(state.nodes, start=1):
        inside = ["link set lo up", f"addr add {state.address(number)}/24 dev eth0", "link set eth0 up"]
        _batch(inside, "-n", layout.namespace(node))


def remove(layout: Layout) -> None:
    """Removes every link and namespace with this cluster's tag, whichever of them a crash has left."""
    _batch([f"link del {link}" for link in links(layout)])
    _batch([f"netns del {namespace}" for namespace in namespaces(layout)])


def _batch(lines: list[str], *options: str) -> None:
    if lines:
        run("ip", *options, "-batch", "-", stdin="\n".join(lines) + "\n", timeout_seconds=60)


def links(layout: Layout) -> dict[str, bool]:
    """Name of each of our links on the machine, and whether it is up."""
    found = json.loads(run("ip", "-json", "link", "show") or "[]")
    ours = (link for link in found if link["ifname"].startswith(f"{layout.tag}-"))
    return {link["ifname"]: "UP" in link["flags"] for link in ours}


def namespaces(layout: Layout) -> list[str]:
    """Our network namespaces."""
    found = json.loads(run("ip", "-json", "netns", "list") or "[]")
    return [namespace["name"] for namespace in found if namespace["name"].startswith(f"{layout.tag}-")]


def set_cable(layout: Layout, state: State, node: str, up: bool) -> None:
    """Plugs a node's cable in or pulls it: packets stop in both directions, and nobody is told."""
    run("ip", "link", "set", layout.link(state.number(node)), "up" if up else "down")
