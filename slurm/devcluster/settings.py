"""What may be chosen about a cluster, each choice with its default, its option and its rule."""

from __future__ import annotations

import re
from dataclasses import Field, dataclass, field, fields
from typing import Any

from devcluster.shell import ClusterError

MAX_NODES = 32
MAX_GPUS = 16
HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
SHORT_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")


def _option(default: Any, help_text: str, choices: tuple[str, ...] = (), repeat: bool = False) -> Any:
    """A dataclass field that is a command line option too, so that meaning and default are written down once."""
    return field(default=default, metadata={"help": help_text, "choices": choices, "repeat": repeat})


@dataclass(frozen=True)
class Settings:
    """The settings of one cluster; two equal ones make the same cluster, so `up` can tell whether it has work to do.

    The defaults are those of an ordinary site that allows preemption, except for the times: a site waits minutes before
    it gives a silent node up, a developer does not want to.
    """

    nodes: int = _option(4, f"number of nodes, 1 to {MAX_NODES}")
    node_prefix: str = _option("n", "nodes are called PREFIX1, PREFIX2...")
    node_names: tuple[str, ...] = _option(
        (), "comma-separated names of the nodes, instead of --nodes and --node-prefix"
    )
    cluster_name: str = _option("ddp", "ClusterName")
    gpus: int = _option(4, f"pretend GPUs a node, 0 to {MAX_GPUS}")
    gpu_type: str = _option("a100", "type of the pretend GPUs, as in --gres=gpu:a100:2")
    cpus: int = _option(16, "CPUs a node; the nodes may claim more than the machine has")
    memory_mib: int = _option(32000, "memory a node in MiB; also only claimed")
    proctrack: str = _option(
        "linuxproc", "how slurmd tracks a job's processes; cgroup enforces memory limits too", ("linuxproc", "cgroup")
    )
    preempt_mode: str = _option("REQUEUE", "what happens to a preempted job", ("REQUEUE", "CANCEL", "OFF"))
    preempt_signal: bool = _option(True, "preempted jobs get their --signal when the grace begins")
    grace_time: int = _option(10, "GraceTime of partition main: seconds between preemption and the kill")
    kill_wait: int = _option(5, "KillWait: seconds between SIGTERM and SIGKILL at the time limit")
    requeue_delay: int = _option(120, "seconds a requeued job waits before it may start again (120 is Slurm's default)")
    short_minutes: int = _option(5, "MaxTime of partition short in minutes")
    slurmd_timeout: int = _option(30, "SlurmdTimeout: seconds of silence after which a node is DOWN")
    accounting: bool = _option(True, "slurmdbd and its database, without which there is no sacct")
    store_comment: bool = _option(False, "AccountingStoreFlags=job_comment: sacct keeps --comment")
    extra: tuple[str, ...] = _option((), "a line for slurm.conf, may be repeated; a known key is replaced", repeat=True)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes in order."""
        return self.node_names or tuple(f"{self.node_prefix}{number}" for number in range(1, self.nodes + 1))

    def check(self) -> None:
        """Refuses, with all faults at once, what would end in a cluster that does not come up."""
        faults = [f"{what}: {rule}" for holds, what, rule in self._rules() if not holds]
        if faults:
            raise ClusterError("these settings make no cluster:\n" + "\n".join(f"  {fault}" for fault in faults))

    def _rules(self) -> list[tuple[bool, str, str]]:
        """(holds, option and value, rule) of everything that `check` demands."""
        names = self.names
        strange = [name for name in names if not HOST_NAME.fullmatch(name)]
        lowest = {
            "cpus": 1,
            "grace_time": 0,
            "kill_wait": 1,
            "short_minutes": 1,
            "slurmd_timeout": 5,
            "requeue_delay": 5,
        }
        lowest["memory_mib"] = self.cpus
        numbers = [
            (getattr(self, name) >= least, f"--{name.replace('_', '-')} {getattr(self, name)}", f"at least {least}")
            for name, least in lowest.items()
        ]
        return [
            (1 <= len(names) <= MAX_NODES, f"--nodes {len(names)}", f"must be 1 to {MAX_NODES}"),
            (
                not strange,
                f"node names {strange}",
                "lower-case letters, digits and dashes, at most 40, no dash at an end",
            ),
            (len(set(names)) == len(names), f"--node-names {','.join(names)}", "a name must not come twice"),
            (0 <= self.gpus <= MAX_GPUS, f"--gpus {self.gpus}", f"must be 0 to {MAX_GPUS}"),
            (bool(SHORT_NAME.fullmatch(self.gpu_type)), f"--gpu-type {self.gpu_type}", "lower-case letters and digits"),
            (bool(SHORT_NAME.fullmatch(self.cluster_name)), f"--cluster-name {self.cluster_name}", "same"),
            (
                all("=" in line and "\n" not in line for line in self.extra),
                f"--extra {self.extra}",
                "one KEY=VALUE each",
            ),
            *numbers,
        ]

    def to_json(self) -> dict[str, Any]:
        """A form that survives JSON; `from_json` is its inverse."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Settings:
        """Reads what `to_json` wrote. A missing or unknown key raises TypeError: it is another version's state."""
        if set(stored) != {item.name for item in fields(cls)}:
            raise TypeError("settings of another version")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()
        }
        return cls(**values)

    def differences(self, other: Settings) -> list[str]:
        """`--option here -> there` for every setting that differs."""
        return [
            f"{option_name(item)} {getattr(self, item.name)} -> {getattr(other, item.name)}"
            for item in fields(self)
            if getattr(self, item.name) != getattr(other, item.name)
        ]


def option_name(item: Field[Any]) -> str:
    """The command line option of a settings field."""
    return "--" + item.name.replace("_", "-")
