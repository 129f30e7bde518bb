"""Batch arithmetic and the learning rate, as pure functions. Free of torch: the launcher shows them too."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import BatchConfig, OptimConfig, ScheduleConfig, TrainConfig
from .errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is made: per_rank x accumulate x world_size = global_size samples."""

    per_rank: int
    """Samples in one micro-batch of one rank."""
    accumulate: int
    """Micro-batches a rank adds up before an optimizer step."""
    world_size: int

    @property
    def global_size(self) -> int:
        """Samples in one optimizer step over all ranks."""
        return self.per_rank * self.accumulate * self.world_size


def batch_plan(config: BatchConfig, world_size: int) -> BatchPlan:
    """Work out the missing numbers of `train.batch` for a world size. Nothing is ever rounded.

    Given `per_rank`: accumulate is 1 unless given. Given `global`: it is divided by world_size x accumulate.
    Given both: accumulate is what remains. Given all three: they must agree.
    Errors: ConfigError with the numbers when they do not divide, or when none is given.
    """
    given = {"per_rank": config.per_rank, "global": config.global_size, "accumulate": config.accumulate}
    for key, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"train.batch.{key}: {value} is below 1; give at least one sample")
    per_rank, total, accumulate = config.per_rank, config.global_size, config.accumulate
    if total is None:
        if per_rank is None:
            raise ConfigError("train.batch: give per_rank (samples of one rank), or global (samples of all), or both")
        return BatchPlan(per_rank, accumulate or 1, world_size)
    if per_rank is None:
        accumulate = accumulate or 1
        per_rank = _divide(total, world_size * accumulate, f"{world_size} ranks x {accumulate} accumulation")
        return BatchPlan(per_rank, accumulate, world_size)
    rest = _divide(total, world_size * per_rank, f"{per_rank} per rank x {world_size} ranks")
    if accumulate is not None and accumulate != rest:
        raise ConfigError(
            f"train.batch: {per_rank} per rank x {accumulate} accumulation x {world_size} ranks = "
            f"{per_rank * accumulate * world_size}, not the global batch of {total}; leave one of the three out"
        )
    return BatchPlan(per_rank, rest, world_size)


def _divide(total: int, parts: int, words: str) -> int:
    if total % parts:
        below, above = total // parts * parts, (total // parts + 1) * parts
        near = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(f"train.batch.global: {total} is no multiple of {words} = {parts}; {near} would be")
    return total // parts


def scaled_lr(optim: OptimConfig, global_size: int) -> float:
    """Peak learning rate for a global batch of `global_size` samples.

    linear: base_lr x k with k = global_size / base_batch (Goyal et al. 2017, "Accurate, Large Minibatch SGD",
    section 2.1); sqrt: base_lr x sqrt(k) (Krizhevsky 2014, "One weird trick", section 5); none: base_lr.
    """
    if optim.base_batch is None or optim.scaling == "none":
        return optim.base_lr
    if optim.base_batch < 1:
        raise ConfigError(f"train.optim.base_batch: {optim.base_batch} is below 1; give the batch base_lr was tuned at")
    ratio = global_size / optim.base_batch
    return optim.base_lr * (ratio if optim.scaling == "linear" else math.sqrt(ratio))


def lr_at(step: int, peak: float, schedule: ScheduleConfig, total_steps: int) -> float:
    """Learning rate of the optimizer step number `step` (0-based; steps from total_steps on keep the last rate).

    Warmup (gradual, Goyal et al. 2017, section 2.2): step s < warmup_steps uses peak x (s + 1) / warmup_steps, so the
    first step already learns and step warmup_steps - 1 is the first at the peak. After it, with
    t = (s - warmup_steps) / (total_steps - warmup_steps) in [0, 1] and m = min_lr_ratio:
    constant: peak; linear: peak x (1 - (1 - m) t); cosine: peak x (m + (1 - m)(1 + cos(pi t)) / 2) (Loshchilov and
    Hutter 2017, "SGDR", equation 5); wsd: peak, then linear to m over the last decay_steps (Hu et al. 2024, "MiniCPM",
    section 4). The decay would reach m at step total_steps, one after the last.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    start = schedule.warmup_steps
    if schedule.decay == "wsd":
        start = max(start, total_steps - decay_steps(schedule, total_steps))
    if step <= start:
        return peak
    done = 1.0 if step >= total_steps else (step - start) / (total_steps - start)
    share = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule.decay == "cosine" else 1.0 - done
    return peak * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * share)


def decay_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Length of wsd's final decay in steps: as given, else a tenth of the run, at least one step."""
    return schedule.decay_steps if schedule.decay_steps is not None else max(1, total_steps // 10)


def check_schedule(schedule: ScheduleConfig, total_steps: int) -> None:
    """Refuse a schedule that does not fit a run of `total_steps` steps.

    Errors: ConfigError naming the field and the numbers.
    """
    if schedule.warmup_steps < 0:
        raise ConfigError(f"train.schedule.warmup_steps: {schedule.warmup_steps} is negative; 0 means no warmup")
    if schedule.warmup_steps and schedule.warmup_steps >= total_steps:
        raise ConfigError(
            f"train.schedule.warmup_steps: {schedule.warmup_steps} steps of warmup do not fit into a run of "
            f"{total_steps} steps; shorten it or train longer"
        )
    if not 0.0 <= schedule.min_lr_ratio <= 1.0:
        raise ConfigError(f"train.schedule.min_lr_ratio: {schedule.min_lr_ratio} is not between 0 and 1")
    if schedule.decay == "wsd":
        length = decay_steps(schedule, total_steps)
        if not 1 <= length <= total_steps - schedule.warmup_steps:
            raise ConfigError(
                f"train.schedule.decay_steps: {length} is not between 1 and the {total_steps - schedule.warmup_steps} "
                "steps after the warmup"
            )


def arithmetic_lines(config: TrainConfig, plan: BatchPlan, total_steps: int | None = None) -> list[str]:
    """The lines shown at start: how the global batch and the learning rate come about, and what holds of the bits.

    `batch  32 per rank x 1 accumulation x 4 ranks = 128`
    `lr     0.001 x 128/32 = 0.004, warmup 50 steps, cosine to 0 at step 220`
    `bits   the same on each number of ranks that divides 4, with 32 per rank`     where `reproducible` is set
    """
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    batch = f"batch  {plan.per_rank} per rank x {plan.accumulate} accumulation x {ranks} = {plan.global_size}"
    lines = [batch, f"lr     {_rate(config.optim, plan)}, {_shape(config.schedule, total_steps)}"]
    if config.reproducible:
        count = plan.accumulate * plan.world_size
        lines.append(f"bits   the same on each number of ranks that divides {count}, with {plan.per_rank} per rank")
    return lines


def _rate(optim: OptimConfig, plan: BatchPlan) -> str:
    peak = scaled_lr(optim, plan.global_size)
    if optim.base_batch is None or optim.scaling == "none":
        return f"{peak:g} (not scaled)"
    ratio = f"{plan.global_size}/{optim.base_batch}"
    return f"{optim.base_lr:g} x {ratio if optim.scaling == 'linear' else f'sqrt({ratio})'} = {peak:g}"


def _shape(schedule: ScheduleConfig, total_steps: int | None) -> str:
    warmup = f"warmup {schedule.warmup_steps} steps" if schedule.warmup_steps else "no warmup"
    if schedule.decay == "constant":
        return f"{warmup}, constant"
    end = "" if total_steps is None else f" at step {total_steps}"
    kind: str = schedule.decay
    if kind == "wsd" and (total_steps is not None or schedule.decay_steps is not None):
        kind = f"wsd, last {decay_steps(schedule, total_steps or 0)} steps"
    return (
        f"{warmup}, {kind} to {schedule.min_lr_ratio:g} of it{end}"
        if schedule.min_lr_ratio
        else (f"{warmup}, {kind} to 0{end}")
    )
