"""Removing the control groups that slurmd makes for a node and never removes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def of_node(node: str, root: Path = ROOT) -> list[Path]:
    """The node's group in each hierarchy: version 1 has one a controller, version 2 a scope below system.slice."""
    return [
        *root.glob(f"*/slurm_{node}"),
        *root.glob(f"*/system.slice/{node}_slurmstepd.scope"),
        *root.glob(f"system.slice/{node}_slurmstepd.scope"),
    ]


def remove(nodes: Iterable[str]) -> None:
    """Removes the nodes' groups from the leaves up. The kernel refuses a group that is in use, which then stays."""
    for group in (group for node in nodes for group in of_node(node)):
        for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            _remove_if_empty(folder)
        _remove_if_empty(group)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
