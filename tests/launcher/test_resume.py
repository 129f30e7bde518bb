"""Proves what `launch resume` makes of a spec before it starts anything; tests/e2e/test_resume.py resumes real runs.

python -m pytest tests/launcher/test_resume.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import submit
from launcher.resume import prepare
from training.config import BatchConfig

from .conftest import Resolve

SPEC = """\
name: t
resources: {nodes: 1, tasks_per_node: 2}
train: {task: digits, steps: 20, batch: {per_rank: 12}}
"""


@pytest.mark.parametrize(
    ("overrides", "batch"),
    [
        (["resources.tasks_per_node=1"], BatchConfig(per_rank=12, global_size=24)),
        (["resources.tasks_per_node=3"], BatchConfig(global_size=24)),
        (["resources.tasks_per_node=1", "train.batch.per_rank=8"], BatchConfig(per_rank=8)),
    ],
)
def test_a_run_that_has_saved_nothing_yet_keeps_its_global_batch_unless_another_is_asked_for(
    overrides: list[str], batch: BatchConfig, resolve: Resolve, tmp_path: Path
) -> None:
    run = submit.prepare(resolve(SPEC), tmp_path).folder
    resolved, _ = prepare(run, overrides, change=False)
    assert resolved.spec.train is not None
    assert resolved.spec.train.batch == batch


@pytest.mark.parametrize(
    ("batch", "overrides", "kept"),
    [
        ("{global: 32, accumulate: 2}", [], BatchConfig(per_rank=8, global_size=32)),
        ("{global: 32, accumulate: 2}", ["resources.tasks_per_node=1"], BatchConfig(per_rank=8, global_size=32)),
        ("{global: 24}", ["resources.tasks_per_node=3"], BatchConfig(global_size=24)),
    ],
)
def test_the_micro_batch_stays_also_where_the_spec_gave_the_global_batch(
    batch: str, overrides: list[str], kept: BatchConfig, resolve: Resolve, tmp_path: Path
) -> None:
    run = submit.prepare(resolve(SPEC.replace("{per_rank: 12}", batch)), tmp_path).folder
    resolved, _ = prepare(run, overrides, change=False)
    assert resolved.spec.train is not None
    assert resolved.spec.train.batch == kept
