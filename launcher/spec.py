"""What a job spec may say: one dataclass a section. A default of None leaves the option out of the script."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from training.config import TrainConfig, WandbConfig


@dataclass
class Resources:
    """What the job asks of the cluster, in Slurm's words."""

    nodes: int = 1
    tasks_per_node: int = 1
    """Ranks on each node; one task is one rank."""
    cpus_per_task: int = 1
    """CPU cores of a rank; also its OMP_NUM_THREADS."""
    gpus_per_node: str | None = None
    """A count, or type:count as in a100:4."""
    gpus_per_task: str | None = None
    """A count, or type:count. Each rank then sees its own GPUs only."""
    memory: str | None = None
    """Memory of each node: 4G, 4096 (MB), 0 (all of it)."""
    memory_per_cpu: str | None = None
    memory_per_gpu: str | None = None
    time: str | None = None
    """Limit in any form of Slurm's: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, UNLIMITED."""


@dataclass
class SlurmOptions:
    """Options that only the Slurm executor uses."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    gres: str | None = None
    """For sites that give GPUs by gres only: gpu:2 or gpu:a100:2, for each node."""
    options: Any = field(default=None, metadata={"scalars": "text"})  # numbers in it stay as they were written
    """Further sbatch options: a mapping (mail-type: END, exclusive: true) or a list ("--mail-type=END")."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that run on the first node before srun, such as `module load cuda`. They are code, and yours."""
    srun_options: list[str] = field(default_factory=list)
    """Further arguments of srun, each one argument."""


@dataclass
class Rendezvous:
    """How the ranks find each other."""

    timeout_s: int = 120
    """How long to wait until every rank has reached the head, before the missing ones are named and the job fails."""
    interface: str | None = None
    """Network interface for NCCL and gloo; null: their own choice."""


@dataclass
class Restart:
    """What happens after an attempt that did not finish."""

    mode: Literal["auto", "none"] = "auto"
    """auto: Slurm starts the job again, under the same id, after a node failure, a preemption or its time limit, and it
    goes on from its newest checkpoint; none: it does not."""


@dataclass
class JobSpec:
    """A whole spec, resolved."""

    name: str = "???"
    executor: Literal["auto", "slurm", "local"] = "auto"
    """auto: Slurm where sbatch is found, else local."""
    profile: str | None = None
    """Profile of the site's configuration file; null: the one that matches, or the file's default."""
    runs: str = "runs"
    """Folder of the run folders, relative to the folder that `launch` was called in."""
    resources: Resources = field(default_factory=Resources)
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    env: dict[str, str] = field(default_factory=dict)
    """Variables that every rank gets, byte for byte. No secrets here: they are written to the run folder."""
    python_path: list[str] = field(default_factory=list)
    """Folders put first on the ranks' import path, relative to the spec file."""
    train: TrainConfig | None = None
    command: list[str] | None = None
    """Any program and its arguments in place of `train`; no shell sees it."""
    wandb: WandbConfig | None = None
    restart: Restart = field(default_factory=Restart)
