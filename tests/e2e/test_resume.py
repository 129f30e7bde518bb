"""Proves that `launch resume` goes on where a run was, with other numbers of ranks too, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

from .conftest import LAUNCH, Launch, environment

SPEC = """\
name: again
resources: {tasks_per_node: 2}
train:
  task: digits
  steps: 60
  batch: {per_rank: 12}
  optim: {base_lr: 1.0e-3}
  checkpoint: {every_steps: 20}
  log: {every_steps: 5}
  eval: {at_end: false}
env: {LITERAL: "\\\\${not.a.key}"}
"""


def _run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def test_a_finished_run_is_made_longer_at_other_numbers_of_ranks_and_holds(tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    assert launch(tmp_path, "spec.yaml", "executor=local").returncode == 0
    run = _run(tmp_path)
    name = run.name
    for steps, ranks, shown in ((80, 1, "12 per rank x 2 accumulation x 1 rank = 24"), (95, 3, "8 per rank")):
        done = launch(tmp_path, "resume", name, f"train.steps={steps}", f"resources.tasks_per_node={ranks}")
        assert done.returncode == 0, done.stderr
        assert shown in done.stdout
        assert "step 5/60" not in done.stdout
    assert "resume step-000000080: step 80/95, 1917 samples seen" in done.stdout
    refused = launch(tmp_path, "resume", name, "train.steps=120", "resources.tasks_per_node=5")
    assert refused.returncode == 2
    assert "train.batch.global: 24 is no multiple of 5 ranks" in refused.stderr
    checked = launch(tmp_path, "verify", name)
    assert checked.returncode == 0, checked.stdout
    assert "3 attempts: done, done, done; went on from step 60, 80" in checked.stdout
    assert json.loads((run / "resumes.jsonl").read_text().splitlines()[0])["changed"]["train.steps"] == "60 -> 80"
    assert "\\${not.a.key}" not in (run / "spec.yaml").read_text()
    assert "${not.a.key}" in (run / "spec.yaml").read_text()


def test_what_the_steps_hang_on_is_refused_and_nothing_is_written(tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    assert launch(tmp_path, "spec.yaml", "executor=local", "train.steps=20").returncode == 0
    run = _run(tmp_path)
    before = (run / "spec.yaml").read_bytes()
    for override in ("train.optim.base_lr=1", "train.seed=9", "train.schedule.decay=cosine"):
        done = launch(tmp_path, "resume", run.name, "train.steps=40", override)
        assert done.returncode == 2
        assert f"{override.partition('=')[0]}: " in done.stderr
        assert "launch a new run, with train.init_from for its weights, or say --change" in done.stderr
    assert (run / "spec.yaml").read_bytes() == before
    done = launch(tmp_path, "resume", run.name, "train.steps=40", "train.optim.base_lr=0.5", "--change")
    assert done.returncode == 0, done.stderr
    assert "lr     0.5" in done.stdout
    refused = launch(tmp_path, "resume", run.name, "train.steps=60", "train.batch.global=48")
    assert refused.returncode == 2
    assert "was trained with a global batch of 24" in refused.stderr


def test_a_run_that_still_runs_is_not_resumed(user: Path, launch: Launch) -> None:
    child = subprocess.Popen(
        [LAUNCH, "spec.yaml", "train.options.pause=0.05", "train.steps=4000", "train.checkpoint.at_end=true"],
        cwd=user,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with child:
        assert child.stdout is not None
        while "step " not in child.stdout.readline():
            time.sleep(0.01)
        run = _run(user)
        refused = launch(user, "resume", run.name)
        assert refused.returncode == 5
        assert "attempt 1 still runs here, as process" in refused.stderr
        child.send_signal(signal.SIGINT)
        child.stdout.read()
        assert child.wait(60) == 130
    done = launch(user, "resume", run.name, "train.steps=1", "train.options.pause=0")
    assert done.returncode == 2  # the task's options may not change
    assert "train.options" in done.stderr


def test_a_run_that_is_not_there(tmp_path: Path, launch: Launch) -> None:
    done = launch(tmp_path, "resume", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nowhere: no run folder (one has a spec.yaml), nor is there a run runs/nowhere" in done.stderr
