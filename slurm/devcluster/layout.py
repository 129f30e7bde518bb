"""Every path and every name that a cluster uses, so that two clusters never meet and `down` knows what to remove."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from devcluster.shell import ClusterError

HOME_VARIABLE = "DDP_CLUSTER_HOME"
DEFAULT_HOME = "/var/lib/ddp-cluster"
MAX_HOME_LENGTH = 70  # a Unix socket's path may have 107 characters, and ours lie two folders below


class Layout:
    """The names of one cluster, all derived from its home folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.tag = "ddp" + hashlib.sha256(str(home).encode()).hexdigest()[:5]
        """Prefix of namespaces and network links; those may have 15 characters at most."""
        self.etc = home / "etc"
        self.slurm_conf = self.etc / "slurm.conf"
        self.slurmdbd_conf = self.etc / "slurmdbd.conf"
        self.state = home / "state.json"
        self.pids = home / "pids"
        self.leases = home / "leases"
        self.logs = home / "log"
        self.devices = home / "dev"
        self.controller_state = home / "controller"
        self.spool = home / "spool"
        self.munge = home / "munge"
        self.munge_socket = self.munge / "munge.socket"
        self.database = home / "db"
        self.database_socket = self.database / "db.sock"
        self.controller_name = f"{self.tag}-controller"
        """Host name under which slurmctld and slurmdbd run; it resolves to the bridge, not to a loopback address."""
        self.bridge = f"{self.tag}-br"

    @classmethod
    def from_environment(cls) -> Layout:
        """The cluster that DDP_CLUSTER_HOME names, or the default one."""
        text = os.environ.get(HOME_VARIABLE) or DEFAULT_HOME
        if (
            not text.startswith("/")
            or len(text) > MAX_HOME_LENGTH
            or not text.isascii()
            or any(c.isspace() for c in text)
        ):
            raise ClusterError(
                f"{HOME_VARIABLE}={text!r}: must be an absolute path of at most {MAX_HOME_LENGTH} ASCII characters"
                " without spaces, because sockets lie in it and slurm.conf names it"
            )
        return cls(Path(os.path.normpath(text)))

    def namespace(self, node: str) -> str:
        """Name of a node's network namespace."""
        return f"{self.tag}-{node}"

    def link(self, number: int) -> str:
        """Name of the host's end of the cable to node number 1, 2..."""
        return f"{self.tag}-{number}"

    def log(self, process: str) -> Path:
        """Where a daemon's output goes."""
        return self.logs / f"{process}.log"

    def check_reachable(self) -> None:
        """Refuses a home that ordinary users cannot enter: their jobs could not read slurm.conf."""
        for folder in self.home.parents:
            if folder.exists() and not folder.stat().st_mode & 0o001:
                raise ClusterError(
                    f"{folder} is closed to other users (mode {folder.stat().st_mode & 0o777:04o}), so their jobs"
                    f" could not read {self.slurm_conf}; choose another {HOME_VARIABLE}"
                )
