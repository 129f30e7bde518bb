"""What a drill runs: the user's own spec on this machine, made shorter, at its own and at other numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from training.config import TrainConfig
from training.schedule import batch_plan

from .. import gpus, units
from ..errors import UsageError
from ..spec import JobSpec

LONGEST_STEPS = 120
"""Steps of a drill, unless it is told otherwise or the spec itself has fewer."""
SHORTEST_STEPS = 8
SAVES = 8
"""About so many checkpoints, so that a resume has to find the right one."""
_CLOSEST_SAVES = 4
"""With many faults there are more, but none closer than so many steps."""
_MOST_RANKS = 4
"""On the CPU, other numbers of ranks are tried up to this one, or up to the spec's own."""


@dataclass(frozen=True)
class Course:
    """The shape of a drill's runs."""

    steps: int
    every: int
    """Steps between saves."""
    ranks: int
    others: tuple[int, ...]
    """Other numbers of ranks that make the same global batch, the one nearest to `ranks` first."""
    why_none: str
    """Where there is none: why."""
    overrides: tuple[str, ...]
    """What is changed in the spec, but for where the runs are."""


def course(spec: JobSpec, steps: int | None, faults: int, env: Mapping[str, str]) -> Course:
    """The course of a drill with so many faults, for a spec that is valid.

    `steps`: as asked for, or None. Errors: UsageError for a spec that cannot be rehearsed.
    """
    train, ranks = spec.train, spec.resources.nodes * spec.resources.tasks_per_node
    if train is None:
        raise UsageError(
            f"{spec.name}: a drill compares checkpoints and losses, and a `command` has none that we know; "
            "give a spec with a `train` section"
        )
    if steps is None:
        steps = max(SHORTEST_STEPS, min(train.steps or LONGEST_STEPS, LONGEST_STEPS))
    elif steps < SHORTEST_STEPS:
        raise UsageError(f"--steps: {steps} leaves no room between saves; give at least {SHORTEST_STEPS}")
    saves = max(SAVES, min(faults // 2, steps // _CLOSEST_SAVES))
    every = max(1, steps // saves)
    plan, (limit, what) = batch_plan(train.batch, ranks), _most_ranks(spec, env)
    size = plan.global_size // plan.per_rank if train.reproducible else plan.global_size
    others = sorted((n for n in range(1, limit + 1) if n != ranks and size % n == 0), key=lambda n: abs(n - ranks))
    batch = f"a global batch of {size}" + (
        " micro-batches (train.reproducible keeps them)" if train.reproducible else ""
    )
    none = f"{batch} is a multiple of no other number of ranks up to {limit} ({what})"
    return Course(steps, every, ranks, tuple(others), "" if others else none, _shorter(train, steps, every))


def at(ranks: int) -> list[str]:
    """Overrides that make a job of so many ranks."""
    return ["resources.nodes=1", f"resources.tasks_per_node={ranks}"]


def batch_at(train: TrainConfig, own: int, ranks: int) -> list[str]:
    """Overrides that keep the global batch of `own` ranks, as `launch resume` keeps it: by accumulation if it can."""
    size, given = batch_plan(train.batch, own).global_size, train.batch.per_rank
    per_rank = given if given is not None and size % (given * ranks) == 0 else ""
    return [f"train.batch.global={size}", f"train.batch.per_rank={per_rank}", "train.batch.accumulate="]


def _most_ranks(spec: JobSpec, env: Mapping[str, str]) -> tuple[int, str]:
    """The most ranks that are tried here, and why. Two ranks cannot talk to each other on one GPU.

    Errors: UsageError when the spec itself has more.
    """
    resources = spec.resources
    ranks = resources.nodes * resources.tasks_per_node
    devices, wanted = len(gpus.present(env.get("CUDA_VISIBLE_DEVICES"))), gpus.per_node(resources)
    if not devices or not wanted or (spec.train is not None and spec.train.device == "cpu"):
        return max(ranks, _MOST_RANKS), "more are not tried on the CPU"
    each = 1 if resources.gpus_per_task is None else max(1, units.gpu_count(resources.gpus_per_task))
    there = f"this machine has {devices} GPU{'s' if devices > 1 else ''}"
    if ranks * each > devices:
        raise UsageError(
            f"resources: {ranks} ranks with {each} GPU{'s' if each > 1 else ''} each, but {there}; "
            f"rehearse with fewer: resources.nodes=1 resources.tasks_per_node={max(1, devices // each)}"
        )
    return min(devices, wanted if resources.gpus_per_task is None else devices) // each, there


def _shorter(train: TrainConfig, steps: int, every: int) -> tuple[str, ...]:
    """Overrides of a run of `steps` steps. What does not fit into so many is cut to a quarter of them."""
    quarter = max(1, steps // 4)
    changes: dict[str, object] = {
        "executor": "local",
        "restart.mode": "none",
        "wandb.mode": "disabled",
        "train.epochs": "",
        "train.steps": steps,
        "train.log.every_steps": 1,
        "train.checkpoint.every_steps": every,
        "train.checkpoint.every_minutes": "",
        "train.checkpoint.auto": "false",
        "train.checkpoint.at_end": "true",
        "train.checkpoint.keep_last": 3,
        "train.checkpoint.retries": min(1, train.checkpoint.retries),
    }
    if train.schedule.warmup_steps > quarter:
        changes["train.schedule.warmup_steps"] = quarter
    if (train.schedule.decay_steps or 0) > quarter:
        changes["train.schedule.decay_steps"] = quarter
    if train.health.not_finite == "rollback":
        changes["train.health.rollback_steps"] = min(train.health.rollback_steps, every)
    return tuple(f"{key}={value}" for key, value in changes.items())
