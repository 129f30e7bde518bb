"""Proves what `launch resume` makes of a spec before it starts anything; tests/e2e/test_resume.py resumes real runs.

python -m pytest tests/launcher/test_resume.py
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from launcher import submit
from launcher.errors import LaunchError
from launcher.finish import Verdict
from launcher.resume import prepare
from training.config import BatchConfig
from training.runfolder import write_json

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


@pytest.mark.parametrize(("name", "text"), [("spec.yaml", "{{{"), ("spec.yaml", ""), ("run.json", "[]")])
def test_a_folder_whose_files_are_not_those_of_a_run_is_said(
    name: str, text: str, resolve: Resolve, tmp_path: Path
) -> None:
    run = submit.prepare(resolve(SPEC), tmp_path).folder
    (run.path / name).write_text(text)
    with pytest.raises(LaunchError, match="is not the folder of a run as it was written"):
        prepare(run, [], change=False)


def test_two_launches_do_not_resume_a_run_at_once(resolve: Resolve, tmp_path: Path) -> None:
    run = submit.prepare(resolve(SPEC), tmp_path).folder
    descriptor = os.open(run.path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(LaunchError, match="another launch is at work on it"):
        prepare(run, [], change=False)
    os.close(descriptor)
    prepare(run, [], change=False)


def test_a_change_that_no_attempt_could_begin_with_is_taken_back(resolve: Resolve, tmp_path: Path) -> None:
    run = submit.prepare(resolve(SPEC), tmp_path).folder
    before = run.spec.read_text()
    for exit_code, text, comes_back in ((5, "CheckpointError: no", True), (5, "Killed: ended by SIGKILL", False)):
        prepare(run, ["train.steps=30"], change=False)
        assert "steps: 30" in run.spec.read_text()
        attempt = run.take_attempt()
        write_json(attempt.result, asdict(Verdict(attempt.number, "failed", exit_code, text=text)))
        prepare(run, [], change=False)
        assert ("steps: 30" not in run.spec.read_text()) is comes_back
    assert "steps: 20" in before
