"""Proves the batch arithmetic and the learning rate: exact values, and laws that hold for every configuration.

pytest tests/training/test_schedule.py
"""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from training.config import BatchConfig, OptimConfig, ScheduleConfig, TrainConfig
from training.errors import ConfigError
from training.schedule import BatchPlan, arithmetic_lines, batch_plan, check_schedule, lr_at, scaled_lr

DECAYS = ["constant", "cosine", "linear", "wsd"]
schedules = st.builds(
    ScheduleConfig,
    warmup_steps=st.integers(0, 50),
    decay=st.sampled_from(DECAYS),
    decay_steps=st.one_of(st.none(), st.integers(1, 50)),
    min_lr_ratio=st.floats(0.0, 1.0),
)


def test_the_course_example() -> None:
    config = TrainConfig(
        batch=BatchConfig(per_rank=32, accumulate=1),
        optim=OptimConfig(base_lr=1e-3, base_batch=32),
        schedule=ScheduleConfig(warmup_steps=50, decay="cosine"),
    )
    plan = batch_plan(config.batch, 4)
    assert plan == BatchPlan(per_rank=32, accumulate=1, world_size=4)
    assert plan.global_size == 128
    assert scaled_lr(config.optim, plan.global_size) == 0.004
    assert arithmetic_lines(config, plan, 220) == [
        "batch  32 per rank x 1 accumulation x 4 ranks = 128",
        "lr     0.001 x 128/32 = 0.004, warmup 50 steps, cosine to 0 at step 220",
    ]


@pytest.mark.parametrize(
    ("config", "world_size", "plan"),
    [
        (BatchConfig(per_rank=8), 3, BatchPlan(8, 1, 3)),
        (BatchConfig(per_rank=8, accumulate=4), 3, BatchPlan(8, 4, 3)),
        (BatchConfig(global_size=96), 4, BatchPlan(24, 1, 4)),
        (BatchConfig(global_size=96, accumulate=2), 4, BatchPlan(12, 2, 4)),
        (BatchConfig(per_rank=8, global_size=96), 4, BatchPlan(8, 3, 4)),
        (BatchConfig(per_rank=8, global_size=96, accumulate=3), 4, BatchPlan(8, 3, 4)),
    ],
)
def test_missing_numbers_are_worked_out(config: BatchConfig, world_size: int, plan: BatchPlan) -> None:
    assert batch_plan(config, world_size) == plan


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BatchConfig(), "train.batch: give per_rank"),
        (BatchConfig(per_rank=0), "train.batch.per_rank: 0 is below 1"),
        (BatchConfig(global_size=100), "100 is no multiple of 3 ranks x 1 accumulation = 3; 99 or 102 would be"),
        (BatchConfig(global_size=2), "2 is no multiple of 3 ranks x 1 accumulation = 3; 3 would be"),
        (BatchConfig(per_rank=8, global_size=100), "100 is no multiple of 8 per rank x 3 ranks = 24; 96 or 120"),
        (BatchConfig(per_rank=8, global_size=96, accumulate=3), "8 per rank x 3 accumulation x 3 ranks = 72, not"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(config: BatchConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        batch_plan(config, 3)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_a_plan_keeps_the_global_batch_at_every_world_size(per_rank: int, ranks: int, accumulate: int) -> None:
    total = per_rank * ranks * accumulate
    plans = [batch_plan(BatchConfig(global_size=total), world) for world in range(1, total + 1) if total % world == 0]
    assert {plan.global_size for plan in plans} == {total}


def test_rules_of_scaling() -> None:
    assert scaled_lr(OptimConfig(base_lr=0.1, base_batch=256, scaling="linear"), 1024) == pytest.approx(0.4)
    assert scaled_lr(OptimConfig(base_lr=0.1, base_batch=256, scaling="sqrt"), 1024) == pytest.approx(0.2)
    assert scaled_lr(OptimConfig(base_lr=0.1, base_batch=256, scaling="none"), 1024) == 0.1
    assert scaled_lr(OptimConfig(base_lr=0.1, base_batch=None), 1024) == 0.1
    with pytest.raises(ConfigError, match=r"train.optim.base_batch: 0"):
        scaled_lr(OptimConfig(base_batch=0), 8)


def test_lines_for_unscaled_and_sqrt_rates() -> None:
    plan = BatchPlan(16, 2, 1)
    plain = TrainConfig(optim=OptimConfig(base_lr=3e-4))
    assert arithmetic_lines(plain, plan) == [
        "batch  16 per rank x 2 accumulation x 1 rank = 32",
        "lr     0.0003 (not scaled), no warmup, constant",
    ]
    rooted = TrainConfig(
        optim=OptimConfig(base_lr=1e-3, base_batch=8, scaling="sqrt"),
        schedule=ScheduleConfig(warmup_steps=5, decay="wsd", min_lr_ratio=0.1),
    )
    assert arithmetic_lines(rooted, plan, 100)[1] == (
        "lr     0.001 x sqrt(32/8) = 0.002, warmup 5 steps, wsd, last 10 steps to 0.1 of it at step 100"
    )


def test_exact_rates() -> None:
    warm = ScheduleConfig(warmup_steps=4, decay="linear")
    assert [lr_at(step, 1.0, warm, 14) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.9]
    assert lr_at(13, 1.0, warm, 14) == pytest.approx(0.1)
    cosine = ScheduleConfig(decay="cosine", min_lr_ratio=0.2)
    assert [lr_at(step, 1.0, cosine, 10) for step in (0, 5, 10, 11)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    wsd = ScheduleConfig(warmup_steps=2, decay="wsd", decay_steps=4)
    assert [lr_at(step, 1.0, wsd, 10) for step in range(10)] == pytest.approx(
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    )


@given(schedules, st.floats(1e-6, 10.0), st.integers(1, 300), st.integers(0, 400))
def test_a_rate_lies_between_its_floor_and_the_peak(
    schedule: ScheduleConfig, peak: float, total: int, step: int
) -> None:
    rate = lr_at(step, peak, schedule, total)
    assert 0.0 <= rate <= peak * (1 + 1e-12)
    if step >= schedule.warmup_steps:
        assert rate >= peak * schedule.min_lr_ratio * (1 - 1e-12)
    if step < total:
        assert rate > 0.0


@given(schedules, st.integers(2, 300))
def test_warmup_rises_and_decay_falls_without_a_jump(schedule: ScheduleConfig, total: int) -> None:
    assume(schedule.warmup_steps + (schedule.decay_steps or 0) < total)
    rates = [lr_at(step, 1.0, schedule, total) for step in range(total)]
    warm = rates[: schedule.warmup_steps]
    assert warm == sorted(warm)
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[schedule.warmup_steps :]))
    if warm:
        assert warm[-1] == 1.0
    assert rates[schedule.warmup_steps] == 1.0


@given(schedules, st.sampled_from(["linear", "sqrt", "none"]), st.integers(1, 40), st.integers(1, 40))
def test_the_rate_depends_on_the_global_batch_and_not_on_the_world_size(
    schedule: ScheduleConfig, scaling: str, per_rank: int, world_size: int
) -> None:
    optim = OptimConfig(base_lr=1e-3, base_batch=32, scaling=scaling)  # type: ignore[arg-type]
    many = batch_plan(BatchConfig(per_rank=per_rank), world_size)
    one = batch_plan(BatchConfig(global_size=many.global_size), 1)
    for step in (0, 7, 99):
        rates = [lr_at(step, scaled_lr(optim, plan.global_size), schedule, 100) for plan in (many, one)]
        assert rates[0] == rates[1]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (ScheduleConfig(warmup_steps=100), "warmup_steps: 100 steps of warmup do not fit into a run of 100 steps"),
        (ScheduleConfig(warmup_steps=-1), "warmup_steps: -1 is negative"),
        (ScheduleConfig(min_lr_ratio=1.5), r"min_lr_ratio: 1\.5 is not between 0 and 1"),
        (ScheduleConfig(warmup_steps=10, decay="wsd", decay_steps=91), "decay_steps: 91 is not between 1 and the 90"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(schedule: ScheduleConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_schedule(schedule, 100)


def test_a_schedule_that_fits_passes() -> None:
    check_schedule(ScheduleConfig(warmup_steps=10, decay="wsd", decay_steps=90), 100)
    check_schedule(ScheduleConfig(), 1)


def test_torch_is_not_imported() -> None:
    code = "import sys, training.schedule; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
