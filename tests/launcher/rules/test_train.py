"""Proves that a training run that cannot be computed as written is refused before a job is submitted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Faults = Callable[..., list[str]]

TRAIN = """\
name: x
resources: {nodes: 2, tasks_per_node: 2}
train:
  task: digits
  epochs: 2
  batch: {global: 128}
"""

GOOD = [
    "train.task=my_package.my_module:MyTask",
    "train.task=mod:Outer.Inner",
    "train.batch={per_rank: 7, global: null}",
    "train.batch={global: 128, per_rank: 8}",
    "train.schedule.warmup_steps=23",
    "train.optim={betas: [0, 0.5]}",
    "train.optim={name: sgd, momentum: 0.9, nesterov: true}",
    "train.schedule={decay: wsd, decay_steps: 5}",
    "train.optim.clip_norm=1.0",
    "train.eval.every_steps=null",
    "train={reproducible: true, batch: {per_rank: 8}}",
    "train={reproducible: true, batch: {per_rank: 8, global: null, accumulate: 2}}",
    "train.health={not_finite: skip, rollback_steps: 99, replica_every_steps: null, hang_timeout_s: null}",
    "train={health: {not_finite: rollback, rollback_steps: 21}, checkpoint: {every_steps: 10}}",
    "train={health: {not_finite: rollback, rollback_steps: 99}, checkpoint: {every_minutes: 1}}",
]


@pytest.mark.parametrize("override", GOOD)
def test_a_run_that_can_be_computed_is_taken(override: str, faults: Faults) -> None:
    assert faults(TRAIN, override) == []


BAD = {
    "train.health.not_finite=rollback": "train.health.not_finite: "
    "rollback, but no checkpoint is saved before the run's end; set train.checkpoint.every_steps",
    "train={health: {not_finite: rollback, rollback_steps: 22}, checkpoint: {every_steps: 10}}": "train.health"
    ".rollback_steps: 22: a checkpoint as old as that may be gone; 3 are kept, 10 steps apart: give at most 21, "
    "or raise keep_last",
    "train.reproducible=true": "train.batch.per_rank: not given, so micro-batches would be smaller on more ranks, and "
    "reproducible is true; say how many samples of the 128 make a micro-batch",
    "train.health.hang_timeout_s=0": "train.health.hang_timeout_s: 0 is out of range; give at least 1",
    "train.task=digit": "train.task: 'digit' is neither a built-in task nor an import path; did you mean digits?",
    "train.task=my_module.MyTask": "train.task: 'my_module.MyTask' is neither a built-in task nor an import path; "
    "write one of digits, text, synthetic, or your own as package.module:Class",
    "train.epochs=null": "train.epochs: neither epochs nor steps is given; give one of the two",
    "train.steps=5": "train.steps: both epochs and steps are given; keep one, set the other null",
    "train.epochs=0": "train.epochs: 0 is out of range; give at least 1",
    "train.seed=-1": "train.seed: -1 is out of range; give at least 0",
    f"train.seed={2**63}": f"train.seed: {2**63} is out of range; give a number below 2^63",
    "train.batch.global=127": "train.batch.global: "
    "127 is no multiple of 4 ranks x 1 accumulation = 4; 124 or 128 would be",
    "train.batch.global=null": "train.batch: "
    "not given; give per_rank (samples of one rank), or global (samples of all), "
    "or both",
    "train.batch={per_rank: 32, accumulate: 2, global: 128}": "train.batch: "
    "32 per rank x 2 accumulation x 4 ranks = 256, "
    "not the global batch of 128; leave one of the three out",
    "train.batch.global=0": "train.batch.global: 0 is out of range; give at least 1",
    "train.optim.base_lr=0": "train.optim.base_lr: 0.0 is out of range; a learning rate is above 0",
    "train.optim.base_lr=.nan": "train.optim.base_lr: nan is out of range; a learning rate is above 0",
    "train.optim.base_lr=1e999": "train.optim.base_lr: inf is out of range; a learning rate is above 0",
    "train.optim.betas=[0.9, 1.0]": "train.optim.betas: [0.9, 1.0] are no two decay rates; "
    "give two numbers from 0 to below 1",
    "train.optim.betas=[0.9]": "train.optim.betas: [0.9] are no two decay rates; give two numbers from 0 to below 1",
    "train.optim.clip_norm=0": "train.optim.clip_norm: 0.0 is out of range; give more than 0, or null",
    "train.optim.momentum=0.9": "train.optim.momentum: has no effect with adamw; "
    "it is for sgd: remove it, or set name: sgd",
    "train.optim={name: sgd, nesterov: true}": "train.optim.nesterov: cannot be used here; "
    "it needs name: sgd and a momentum above 0",
    "train.schedule.warmup_steps=24": "train.schedule.warmup_steps: "
    "24 steps of warmup do not fit into a run of 24 steps; shorten it or train longer",
    "train.schedule.warmup_steps=-1": "train.schedule.warmup_steps: -1 is out of range; give at least 0",
    "train.schedule.min_lr_ratio=1.5": "train.schedule.min_lr_ratio: 1.5 is out of range; give 0 to 1",
    "train.schedule={decay: wsd, decay_steps: 30}": "train.schedule.decay_steps: "
    "30 is not between 1 and the 24 steps after the warmup; change one of these numbers",
    "train.schedule.decay_steps=3": "train.schedule.decay_steps: has no effect with decay: constant; "
    "it is for wsd: set it null",
    "train={batch: {global: 2000}, data: {last: drop}}": "train.batch.global: "
    "2000 samples, more than the 1437 of an epoch, and data.last: drop; "
    "no step would be left: give a smaller batch, or data.last: keep",
    "train.checkpoint.keep_last=0": "train.checkpoint.keep_last: 0 is out of range; give at least 1",
    "train.log.every_steps=0": "train.log.every_steps: 0 is out of range; give at least 1",
}


@pytest.mark.parametrize(("override", "fault"), BAD.items(), ids=list(BAD))
def test_a_run_that_cannot_be_computed_is_refused(override: str, fault: str, faults: Faults) -> None:
    found = [line.split(": ", 1)[1] for line in faults(TRAIN, override)]
    assert len(found) == 1
    assert found[0].startswith(fault.rpartition("; ")[0])


def test_the_warmup_is_compared_with_the_steps_of_the_run(faults: Faults) -> None:
    steps = ["train.epochs=null", "train.steps=10", "train.task=mine:Task"]
    assert faults(TRAIN, *steps, "train.schedule.warmup_steps=9") == []
    assert "do not fit into a run of 10 steps" in faults(TRAIN, *steps, "train.schedule.warmup_steps=10")[0]


def test_a_warmup_of_a_run_whose_length_needs_the_data_is_left_to_the_run(faults: Faults) -> None:
    assert faults(TRAIN, "train.task=mine:Task", "train.schedule.warmup_steps=100000") == []


def test_digits_has_the_samples_that_the_rules_count_with() -> None:
    from launcher.rules.train import BUILT_IN_TASKS, DIGITS_TRAINING_SAMPLES
    from training.task import BUILT_IN
    from training.tasks.digits import Digits

    assert len(Digits().train_data()) == DIGITS_TRAINING_SAMPLES
    assert set(BUILT_IN_TASKS) == set(BUILT_IN)


def test_all_faults_of_a_section_are_told_at_once(faults: Faults) -> None:
    found = faults(TRAIN, "train.optim={base_lr: 0, betas: [2], name: adamv}", "train.batch.global=5", "train.seed=x")
    assert sorted(line.split(": ")[1] for line in found) == [
        "train.batch.global",
        "train.optim.base_lr",
        "train.optim.betas",
        "train.optim.name",
        "train.seed",
    ]
