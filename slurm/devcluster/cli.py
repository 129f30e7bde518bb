"""The command line: reads words, calls one function, prints one answer."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields

from devcluster import faults, lifecycle, packages
from devcluster.layout import DEFAULT_HOME, HOME_VARIABLE, Layout
from devcluster.settings import Settings, option_name
from devcluster.shell import ClusterError, UnavailableError
from devcluster.state import require_state
from devcluster.status import status

NODE_COMMANDS: dict[str, tuple[Callable[[Layout, str], None], str]] = {
    "kill-node": (faults.kill_node, "kill a node's slurmd and its jobs' processes"),
    "revive-node": (faults.revive_node, "start a dead node again"),
    "cut": (faults.cut, "pull a node's network cable"),
    "heal": (faults.heal, "plug it in again"),
}
CONTROLLER_COMMANDS: dict[str, tuple[Callable[[Layout], None], str]] = {
    "pause": (faults.pause, "the controller hangs (SIGSTOP)"),
    "resume": (faults.resume, "the controller goes on (SIGCONT)"),
    "restart-controller": (faults.restart_controller, "stop the controller and start it again"),
    "down": (lifecycle.down, "end everything and leave nothing behind"),
}
UNPRIVILEGED = ("env", "status", "preempt")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="cluster.py", description="A real Slurm cluster on this machine, for development and tests.",
        epilog=f"The cluster lives in {HOME_VARIABLE}, by default {DEFAULT_HOME}.",
    )  # fmt: skip
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="bring the cluster up; installs Debian's packages when they are missing")
    _add_settings(up)
    up.add_argument("--replace", action="store_true", help="restart a cluster that runs with other settings")
    up.add_argument("--lease", type=int, metavar="PID", help="keep it only until process PID ends or calls `release`")
    release = commands.add_parser(
        "release", help="give the lease of a process back; the last one takes the cluster down"
    )
    release.add_argument("pid", type=int)
    shown = commands.add_parser("status", help="daemons and nodes; exit code 1 unless all is well")
    shown.add_argument("--json", action="store_true")
    commands.add_parser("env", help="what the shell must export for sbatch and the like to use this cluster")
    preempt = commands.add_parser("preempt", help="an urgent job takes the nodes of a running job; prints its job id")
    preempt.add_argument("job_id")
    preempt.add_argument("--hold", type=int, default=1, metavar="SECONDS", help="how long it keeps them (default 1)")
    for name, (_, help_text) in NODE_COMMANDS.items():
        commands.add_parser(name, help=help_text).add_argument("node")
    for name, (_, help_text) in CONTROLLER_COMMANDS.items():
        commands.add_parser(name, help=help_text)
    return top


def _add_settings(up: argparse.ArgumentParser) -> None:
    """One option for each field of Settings."""
    for item in fields(Settings):
        help_text = item.metadata["help"]
        common = {"dest": item.name, "help": help_text}
        if item.metadata["repeat"]:
            up.add_argument(option_name(item), action="append", default=[], metavar="LINE", **common)
        elif isinstance(item.default, bool):
            up.add_argument(option_name(item), action=argparse.BooleanOptionalAction, default=item.default, **common)
        else:
            convert = _names if item.default == () else type(item.default)
            shown = "" if item.default == () else f" (default {item.default})"
            common["help"] = help_text + shown
            choices = item.metadata["choices"] or None
            up.add_argument(option_name(item), type=convert, default=item.default, choices=choices, **common)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Settings from parsed options. With --node-names their number is the number of nodes."""
    values = {item.name: getattr(arguments, item.name) for item in fields(Settings)}
    values["extra"] = tuple(values["extra"])
    if values["node_names"]:
        values["nodes"] = len(values["node_names"])
    return Settings(**values)


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command.

    0 is success, 1 a failure with one message on stderr, 2 wrong usage, 3 a machine that cannot host a cluster.
    """
    arguments = parser().parse_args(words)
    os.environ["PATH"] = packages.SEARCH_PATH
    try:
        if os.geteuid() and arguments.command not in UNPRIVILEGED:
            raise UnavailableError(f"{arguments.command} makes network namespaces and runs daemons, so it needs root")
        return _dispatch(arguments, Layout.from_environment())
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 3 if isinstance(error, UnavailableError) else 1


def _dispatch(arguments: argparse.Namespace, layout: Layout) -> int:
    name = arguments.command
    if name == "up":
        return _up(arguments, layout)
    if name == "status":
        found = status(layout)
        print(json.dumps(found.to_json(), indent=1) if arguments.json else found.to_text())
        return 0 if found.healthy else 1
    if name == "env":
        require_state(layout)
        print(f"export SLURM_CONF={shlex.quote(str(layout.slurm_conf))}")
    elif name == "preempt":
        print(faults.preempt(layout, arguments.job_id, arguments.hold))
    elif name == "release":
        lifecycle.release(layout, arguments.pid)
    elif name in NODE_COMMANDS:
        NODE_COMMANDS[name][0](layout, arguments.node)
    else:
        CONTROLLER_COMMANDS[name][0](layout)
    return 0


def _up(arguments: argparse.Namespace, layout: Layout) -> int:
    begin = time.monotonic()
    wanted = settings_from(arguments)
    state = lifecycle.up(layout, wanted, _say, replace=arguments.replace, lease_pid=arguments.lease)
    print(f"{len(state.nodes)} nodes are ready after {time.monotonic() - begin:.1f} s: {', '.join(state.nodes)}")
    print(f"export SLURM_CONF={shlex.quote(str(layout.slurm_conf))}")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr)
