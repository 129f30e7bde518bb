"""Who this rank is, where the head is, and which ports the ranks may meet on.

The head is the first host of the step in the scheduler's order. A step may be smaller than its job, so the step's
variables count, never the job's beside them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .hostlist import HostlistError, expand, expand_tasks_per_node

LOOPBACK = "127.0.0.1"
_NETWORK = Path("/proc/sys/net/ipv4")
_REGIONS = ((10001, 19997), (30000, 35533))
"""(lowest port, number of ports), each number a prime. 30000-32767 belongs to Kubernetes: only a second choice."""
_PORTS_PER_ATTEMPT = 1024
_GOLDEN = 0.6180339887498949
_SERVICES = frozenset(
    (*range(10050, 10052), *range(10248, 10260), 10514, 11211, 11311, 12345, 15672, 16379, 18080, 18888, 19531, 19999)
    + (20000, 20048, 20049, 24007, 24008, 25672, 26257, *range(27015, 27020), 28015, 29400, 29500, 50051, 50070, 60010)
)
"""Ports above 10000 where well-known services listen, torch's own defaults 29400 and 29500 among them."""


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
    nodes_name, counts_name, tasks_name = _scope(env)
    nodes = _parsed(env, nodes_name, expand)
    counts = _parsed(env, counts_name, expand_tasks_per_node)
    place = Placement(
        rank=_number(env, "SLURM_PROCID"),
        local_rank=_number(env, "SLURM_LOCALID"),
        node_rank=_number(env, "SLURM_NODEID"),
        world_size=_number(env, tasks_name) if tasks_name in env else sum(counts),
        local_world_size=counts[min(_number(env, "SLURM_NODEID"), len(counts) - 1)],
        nodes=tuple(nodes),
        tasks_per_node=tuple(counts),
        job=_job(env),
        restart=_number(env, "SLURM_RESTART_COUNT", 0),
        step=env.get("SLURM_STEP_ID", ""),
    )
    _check(place, env, (nodes_name, counts_name, tasks_name))
    offset = sum(counts[: place.node_rank])
    block = env.get("SLURM_DISTRIBUTION", "block").startswith("block") and place.rank == offset + place.local_rank
    return place if block else Placement(**{**place.__dict__, "block": False})


def emulated(nodes: int, tasks_per_node: int) -> list[Placement]:
    """The places of `nodes` pretended nodes on this machine, rank by rank; 127.0.0.1 is the head, 127.0.0.2 the next."""
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


def port_candidates(key: str, attempt: int, count: int = 16) -> list[int]:
    """Ports to try in turn: a function of (key, attempt), the same on every host with the same port settings.

    All lie above 10000, outside the ephemeral range, the ports that the machine reserves and well-known services;
    within 15 successive attempts of a key none comes twice. On a machine whose ephemeral range covers nearly all ports
    above 10000 the range can't be avoided, and the list is chosen as if it did not exist.
    """
    low, high = _ephemeral_range()
    return _candidates(key, attempt, count, range(low, high + 1), _reserved_ports())


def _candidates(key: str, attempt: int, count: int, ephemeral: range, reserved: frozenset[int]) -> list[int]:
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
    chosen: list[int] = []
    for lowest, size in _REGIONS:
        # A golden-ratio stride over a prime number of slots: each attempt's block is spread over the whole region,
        # so that a narrow gap left by the ephemeral range is still met.
        stride = round(size * _GOLDEN)
        slots = range(attempt * _PORTS_PER_ATTEMPT, (attempt + 1) * _PORTS_PER_ATTEMPT)
        ports = [lowest + (start + slot * stride) % size for slot in slots]
        allowed = [port for port in ports if port not in _SERVICES and port not in reserved]
        outside = [port for port in allowed if port not in ephemeral]
        if len(outside) >= count:
            return outside[:count]
        chosen = chosen or allowed[:count]
    return chosen


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = (_NETWORK / "ip_local_port_range").read_text(encoding="ascii").split()
        return int(low), int(high)
    except OSError:
        return 32768, 60999


def _reserved_ports() -> frozenset[int]:
    try:
        text = (_NETWORK / "ip_local_reserved_ports").read_text(encoding="ascii").strip()
    except OSError:
        return frozenset()
    spans = [item.partition("-") for item in text.split(",") if item]
    return frozenset(port for low, _, high in spans for port in range(int(low), int(high or low) + 1))


def _scope(env: Mapping[str, str]) -> tuple[str, str, str]:
    """Names of the variables for nodes, tasks per node and number of tasks: the step's, or the job's without a step."""
    if "SLURM_STEP_NODELIST" in env:
        return "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"
    if env.get("SLURM_NTASKS", "1") != "1" and "SLURM_STEP_ID" not in env:
        raise PlacementError(
            f"SLURM_NTASKS={env['SLURM_NTASKS']}, but no SLURM_STEP_NODELIST and no SLURM_STEP_ID: this process is the "
            "batch script or a shell of the job, not one of its tasks; start the ranks with srun"
        )
    return "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS"


def _parsed[T](env: Mapping[str, str], name: str, parse: Callable[[str], list[T]]) -> list[T]:
    if not env.get(name):
        raise PlacementError(f"{name} is not set or empty; start the ranks with srun")
    try:
        return parse(env[name])
    except HostlistError as error:
        raise PlacementError(f"{name}: {error}") from None
