"""Who this rank is among the ranks, and where the head is.

The head is the first host of the step in the scheduler's order. A step may be smaller than its job, so the step's
variables count, never the job's beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from .hostlist import HostlistError, expand, expand_tasks_per_node

LOOPBACK = "127.0.0.1"
_T = TypeVar("_T")


class _Names(NamedTuple):
    """Names of the variables that describe a step, or a job."""

    nodes: str
    counts: str
    tasks: str


_STEP = _Names("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS")
_JOB = _Names("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS")


class PlacementError(ValueError):
    """The scheduler's variables are missing or contradict one another: names them, the rule and the remedy."""


@dataclass(frozen=True)
class Placement:
    """One rank's place in its step."""

    rank: int
    """Global rank, 0..world_size-1."""
    local_rank: int
    """Rank on its node, 0..local_world_size-1."""
    node_rank: int
    """Index of its node in `nodes`."""
    world_size: int
    local_world_size: int
    nodes: tuple[str, ...]
    """Host names of the step, in the scheduler's order."""
    tasks_per_node: tuple[int, ...]
    """Ranks on each of `nodes`."""
    job: str = ""
    """The job's id, ARRAY_TASK for a task of an array; empty outside of a scheduler."""
    restart: int = 0
    """How often the scheduler has started this job again."""
    step: str = ""
    """The step's id within its job."""
    block: bool = True
    """Whether ranks fill one node after the other (srun's --distribution=block), so that `node_of` may say where."""

    @property
    def head(self) -> str:
        """The host of rank 0."""
        return self.nodes[0]

    @property
    def address(self) -> str:
        """Where the ranks reach the head: its name, or the loopback address when there is no second host."""
        return self.head if len(self.nodes) > 1 else LOOPBACK

    @property
    def host(self) -> str:
        """The scheduler's name for this rank's own host."""
        return self.nodes[self.node_rank]

    def node_of(self, rank: int) -> int | None:
        """Index of the node that `rank` runs on, or None where the distribution leaves it open."""
        if not self.block:
            return None
        return next(n for n in range(len(self.nodes)) if rank < sum(self.tasks_per_node[: n + 1]))


def from_slurm(env: Mapping[str, str]) -> Placement:
    """Read this task's place from srun's variables.

    The job's variables are used only where the step has none, and only for a task that srun started or a single one.
    Errors: PlacementError naming the variables that are missing or contradict each other.
    """
    if "SLURM_PROCID" not in env:
        raise PlacementError("SLURM_PROCID is not set: this process is no task of a step; start the ranks with srun")
    names = _STEP if _STEP.nodes in env else _JOB
    nodes = _parsed(env, names.nodes, expand)
    counts = _parsed(env, names.counts, expand_tasks_per_node)
    world_size = _number(env, names.tasks, sum(counts) if names is _JOB else None)
    rank, local_rank, node_rank = (_number(env, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))
    _check_step(env, names, nodes, counts, world_size)
    _check_task(env, names, counts, (rank, local_rank, node_rank))
    in_block = rank == sum(counts[:node_rank]) + local_rank
    one_way_only = len(counts) == 1 or max(counts) == 1  # srun calls one task a node cyclic
    return Placement(
        rank=rank,
        local_rank=local_rank,
        node_rank=node_rank,
        world_size=world_size,
        local_world_size=counts[node_rank],
        nodes=tuple(nodes),
        tasks_per_node=tuple(counts),
        job=_job(env),
        restart=_number(env, "SLURM_RESTART_COUNT", 0),
        step=env.get("SLURM_STEP_ID", ""),
        block=in_block and (one_way_only or env.get("SLURM_DISTRIBUTION", "block").startswith("block")),
    )


def emulated(nodes: int, tasks_per_node: int) -> list[Placement]:
    """The places of `nodes` pretended nodes on this machine, rank by rank: 127.0.0.1 is the head, then 127.0.0.2."""
    hosts = tuple(f"127.0.{(n + 1) >> 8}.{(n + 1) & 255}" for n in range(nodes))
    return [
        Placement(
            rank=node * tasks_per_node + local,
            local_rank=local,
            node_rank=node,
            world_size=nodes * tasks_per_node,
            local_world_size=tasks_per_node,
            nodes=hosts,
            tasks_per_node=(tasks_per_node,) * nodes,
        )
        for node in range(nodes)
        for local in range(tasks_per_node)
    ]


def variables(
    placement: Placement, address: str, port: int, cpus_per_task: int, interface: str | None = None
) -> dict[str, str]:
    """The variables that torchrun sets for a rank, OMP_NUM_THREADS, and with an interface those of NCCL and gloo."""
    values: dict[str, int | str] = {
        "RANK": placement.rank,
        "LOCAL_RANK": placement.local_rank,
        "WORLD_SIZE": placement.world_size,
        "LOCAL_WORLD_SIZE": placement.local_world_size,
        "NODE_RANK": placement.node_rank,
        "GROUP_RANK": placement.node_rank,
        "GROUP_WORLD_SIZE": len(placement.nodes),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": cpus_per_task,
    }
    if interface is not None:
        values |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    return {name: str(value) for name, value in values.items()}


def _check_step(env: Mapping[str, str], names: _Names, nodes: list[str], counts: list[int], world_size: int) -> None:
    """Refuse variables that describe no step, or that contradict each other."""
    shown = ", ".join(f"{name}={env[name]}" for name in (names.nodes, names.counts, names.tasks) if name in env)
    if names is _JOB and world_size > 1 and "SLURM_STEP_ID" not in env:
        raise PlacementError(
            f"{shown}, but neither SLURM_STEP_NODELIST nor SLURM_STEP_ID is set: this process is the batch script or a "
            "shell of the job, not one of its tasks; start the ranks with srun"
        )
    if len(nodes) != len(counts):
        raise _contradiction(env, f"{shown}: {len(nodes)} hosts, but task counts for {len(counts)}")
    if sum(counts) != world_size:
        raise _contradiction(env, f"{shown}: the task counts add up to {sum(counts)}")


def _check_task(env: Mapping[str, str], names: _Names, counts: list[int], place: tuple[int, int, int]) -> None:
    """Refuse a task's own numbers where they cannot be true under any distribution of tasks over nodes."""
    rank, local_rank, node_rank = place
    world_size = sum(counts)
    where = f"SLURM_PROCID={rank}, SLURM_LOCALID={local_rank}, SLURM_NODEID={node_rank}"
    if rank >= world_size:
        raise _contradiction(env, f"SLURM_PROCID={rank} is not below {names.tasks}={world_size}")
    if node_rank >= len(counts):
        raise _contradiction(env, f"SLURM_NODEID={node_rank}, but {names.nodes}={env[names.nodes]} has {len(counts)}")
    here = counts[node_rank]
    if local_rank >= here:
        raise _contradiction(env, f"SLURM_LOCALID={local_rank}, but {names.counts}={env[names.counts]} has {here} here")
    if rank == 0 and node_rank != 0:
        raise _contradiction(env, f"{where}: rank 0 is not on the step's first host, where the others look for it")
    # Local ids rise with global ids on a node, however the tasks are spread over the nodes.
    if rank < local_rank or world_size - rank < here - local_rank:
        raise _contradiction(env, f"{where}: no task of {names.counts}={env[names.counts]} has these numbers")
    on_node = env["SLURM_GTIDS"].split(",") if "SLURM_GTIDS" in env else []
    if len(on_node) == here and on_node[local_rank] != str(rank):
        raise _contradiction(env, f"{where}, but SLURM_GTIDS={env['SLURM_GTIDS']} has {on_node[local_rank]} there")


def _contradiction(env: Mapping[str, str], text: str) -> PlacementError:
    if env.get("SLURM_DISTRIBUTION") == "arbitrary":
        remedy = "with --distribution=arbitrary the host file must begin with the first host in the scheduler's order"
    else:
        remedy = "variables of another job may have leaked in; start the ranks with srun, from a clean environment"
    return PlacementError(f"{text}; {remedy}")


def _parsed(env: Mapping[str, str], name: str, parse: Callable[[str], list[_T]]) -> list[_T]:
    if not env.get(name):
        raise PlacementError(f"{name} is not set or empty; start the ranks with srun")
    try:
        return parse(env[name])
    except HostlistError as error:
        raise PlacementError(f"{name}: {error}") from None


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise PlacementError(f"{name} is not set; start the ranks with srun")
    if not (text.isascii() and text.isdigit()):
        raise PlacementError(f"{name}={text!r} is no number")
    return int(text)


def _job(env: Mapping[str, str]) -> str:
    """The job's id: 4711, or 4700_3 for task 3 of array 4700."""
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "")
