"""Starting each daemon with its files, and knowing when it answers."""

from __future__ import annotations

import os
import pwd
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from devcluster import render
from devcluster.layout import Layout
from devcluster.processes import recorded, spawn
from devcluster.render import SLURM_USER
from devcluster.shell import run, succeeds, wait_until
from devcluster.state import State, slurm, slurm_environment

MUNGE_USER = "munge"
DATABASE_USER = "mysql"
START_SECONDS = 60  # what a loaded machine may need; an idle one needs a tenth


def write_files(layout: Layout, state: State) -> None:
    """Makes every folder and configuration file, each with the owner that its daemon insists on."""
    for folder in (layout.etc, layout.logs, layout.pids, layout.devices, layout.spool):
        folder.mkdir()
        folder.chmod(0o755)
    own(layout.controller_state, SLURM_USER, 0o700)
    own(layout.munge, MUNGE_USER, 0o755)
    layout.slurm_conf.write_text(render.slurm_conf(layout, state))
    (layout.etc / "gres.conf").write_text(render.gres_conf(layout, state))
    (layout.etc / "cgroup.conf").write_text(render.cgroup_conf(state))
    for file in layout.etc.iterdir():
        file.chmod(0o644)
    for number in range(state.settings.gpus):
        device = layout.devices / f"gpu{number}"
        os.mknod(device, stat.S_IFCHR, os.makedev(1, 3))
        device.chmod(0o666)


def own(path: Path, user: str, mode: int) -> None:
    """Gives a path (made as a folder when it is missing) to a user."""
    if not path.exists():
        path.mkdir()
    entry = pwd.getpwnam(user)
    os.chown(path, entry.pw_uid, entry.pw_gid)
    path.chmod(mode)


def start_munge(layout: Layout) -> None:
    """Starts munged with a fresh key of its own and waits until it encodes."""
    key = layout.munge / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    own(key, MUNGE_USER, 0o400)
    files = {"socket": layout.munge_socket, "key-file": key, "pid-file": layout.munge / "munged.pid"}
    files |= {"seed-file": layout.munge / "seed", "log-file": layout.munge / "munged.log"}
    options = [f"--{option}={path}" for option, path in files.items()]
    spawn(layout, "munged", ["munged", "--foreground", *options], MUNGE_USER)
    _wait(layout, "munged", lambda: succeeds("munge", "--no-input", "--socket", str(layout.munge_socket)))


def start_database(layout: Layout) -> None:
    """Makes MariaDB's system tables, starts it and waits until it listens."""
    own(layout.database, DATABASE_USER, 0o755)  # slurmdbd must reach the socket in it
    settings = layout.database / "my.cnf"
    settings.write_text(render.database_conf(layout))
    (layout.database / "init.sql").write_text(render.DATABASE_INIT)
    options = ("--auth-root-authentication-method=socket", "--skip-test-db", f"--user={DATABASE_USER}")
    run("mariadb-install-db", f"--defaults-file={settings}", *options, timeout_seconds=120)
    spawn(layout, "mariadbd", ["mariadbd", f"--defaults-file={settings}"], DATABASE_USER)
    _wait(layout, "mariadbd", layout.database_socket.exists)


def start_slurmdbd(layout: Layout, state: State) -> None:
    """Starts slurmdbd, waits until it answers, and makes the cluster known to it."""
    layout.slurmdbd_conf.touch(mode=0o600)
    layout.slurmdbd_conf.write_text(render.slurmdbd_conf(layout, state))
    own(layout.slurmdbd_conf, SLURM_USER, 0o600)
    environment = {"SLURM_CONF": str(layout.slurm_conf), "MYSQL_UNIX_PORT": str(layout.database_socket)}
    spawn(layout, "slurmdbd", _under_name(layout.controller_name, "slurmdbd -D"), **environment)
    _wait(layout, "slurmdbd", lambda: _answers(layout, "sacctmgr", "--immediate", "--noheader", "list", "cluster"))
    slurm(layout, "sacctmgr", "--immediate", "add", "cluster", state.settings.cluster_name)


def start_controller(layout: Layout) -> None:
    """Starts slurmctld and waits until it answers."""
    command = _under_name(layout.controller_name, "slurmctld -D")
    spawn(layout, "slurmctld", command, SLURM_CONF=str(layout.slurm_conf))
    _wait(layout, "slurmctld", lambda: _answers(layout, "scontrol", "ping"))


def start_node(layout: Layout, node: str) -> None:
    """Starts a node's slurmd in its network namespace, under its host name.

    Not with `ip netns exec`: that mounts a /sys of its own, in which slurmd finds no cgroups and ends.
    """
    enter = ["nsenter", f"--net=/run/netns/{layout.namespace(node)}"]
    command = [*enter, *_under_name(node, 'slurmd -D -N "$0"')]
    spawn(layout, node_process(node), command, SLURM_CONF=str(layout.slurm_conf))


def _under_name(host_name: str, command: str) -> list[str]:
    """A shell command ($0 is the name) under a host name of its own: Slurm's daemons look themselves up by it."""
    return ["unshare", "--uts", "sh", "-c", f'hostname "$0" && exec {command}', host_name]


def node_process(node: str) -> str:
    """Name under which a node's slurmd is recorded and logged."""
    return f"slurmd-{node}"


def core_processes(state: State) -> list[str]:
    """The daemons whose loss makes a cluster useless."""
    return ["munged", *(["mariadbd", "slurmdbd"] if state.settings.accounting else []), "slurmctld"]


def _answers(layout: Layout, *command: str) -> bool:
    return succeeds(*command, environment=slurm_environment(layout))


def _wait(layout: Layout, name: str, ready: Callable[[], bool]) -> None:
    wait_until(
        f"{name} did not become ready", ready, START_SECONDS, layout.log(name), lambda: bool(recorded(layout, name))
    )
