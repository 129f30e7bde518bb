"""The environment of a submission: what is scrubbed, what is masked, and what is remembered of it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from .secret import name_is_secret

_SCHEDULER = re.compile(
    r"^(SLURM_|SLURMD_|SBATCH_|SRUN_|SALLOC_|SUBMITIT_|PMI_|PMIX_|PMI2_)"
    r"|^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|GROUP_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
    r"|^(ROLE_|TORCHELASTIC_|TORCH_NCCL_ASYNC|DDP_ATTEMPT$|DDP_RUN_FOLDER$)"
)
_KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS"})
"""Which Slurm to talk to, not which job we are in."""
MASK = "********"


def is_outer_job_variable(name: str) -> bool:
    """True for variables that an outer job, srun or torchrun has set and that would mislead the new job."""
    return name not in _KEPT and bool(_SCHEDULER.search(name))


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """A copy without the variables of an outer job; SLURM_CONF stays."""
    return {name: value for name, value in env.items() if not is_outer_job_variable(name)}


@contextmanager
def scrub(env: MutableMapping[str, str] = os.environ, keep: Collection[str] = ()) -> Iterator[None]:
    """Take an outer job's variables, but for `keep`, out of `env` while the block runs."""
    taken = {name: env.pop(name) for name in list(env) if is_outer_job_variable(name) and name not in keep}
    try:
        yield
    finally:
        env.update(taken)


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """A copy for people's eyes: values of names that look like secrets are replaced."""
    return {name: MASK if name_is_secret(name) else value for name, value in env.items()}
