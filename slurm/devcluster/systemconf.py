"""The machine's own /etc/slurm/slurm.conf: where there is none, the default cluster lends its own while it is up.

Slurm's commands then work in any shell, as on a cluster's login node. A configuration that the machine has is never
touched, and a cluster with a home of its own is reached through SLURM_CONF alone.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from devcluster.layout import DEFAULT_HOME, Layout

SYSTEM_CONF = Path("/etc/slurm/slurm.conf")


def lend(layout: Layout, place: Path = SYSTEM_CONF) -> None:
    """Put a link to the cluster's slurm.conf where Slurm's commands look, unless something is there."""
    if layout.home != Path(DEFAULT_HOME) or not place.parent.is_dir():
        return
    with suppress(FileExistsError):
        place.symlink_to(layout.slurm_conf)


def take_back(layout: Layout, place: Path = SYSTEM_CONF) -> None:
    """Remove the link, if it is ours."""
    if place.is_symlink() and place.readlink() == layout.slurm_conf:
        place.unlink()
