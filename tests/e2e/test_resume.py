"""Proves that `launch resume` goes on where a run was, with other numbers of ranks too, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

from training.runfolder import RunFolder

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
    assert "it can go on with 1, 2, 3, 4, 6, 8, 12, 24 ranks" in refused.stderr
    before = (run / "spec.yaml").read_bytes()
    shorter = launch(tmp_path, "resume", name, "train.steps=30")
    assert shorter.returncode == 2
    assert "they make 30 steps, but 95 are done" in shorter.stderr
    assert "attempt 4 could not begin so: the spec is what it was before" in shorter.stderr
    assert (run / "spec.yaml").read_bytes() == before
    checked = launch(tmp_path, "verify", name)
    assert checked.returncode == 0, checked.stdout
    assert "4 attempts: done, done, done, failed; went on from step 60, 80" in checked.stdout
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
    before = (run / "spec.yaml").read_bytes()
    refused = launch(tmp_path, "resume", run.name, "train.steps=60", "train.batch.global=48")
    assert refused.returncode == 2
    assert "train.batch: its steps up to now had a global batch of 24, this would be one of 48" in refused.stderr
    assert (run / "spec.yaml").read_bytes() == before


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


def test_the_order_of_an_epoch_at_4_1_3_and_2_ranks_is_that_of_an_unbroken_run(tmp_path: Path, launch: Launch) -> None:
    spec = SPEC.replace("per_rank: 12", "global: 24").replace("tasks_per_node: 2", "tasks_per_node: 4")
    ledgers = []
    for name, parts in (("changing", ((10, 4), (25, 1), (40, 3), (55, 2))), ("unbroken", ((55, 2),))):
        home = tmp_path / name
        home.mkdir()
        (home / "spec.yaml").write_text(spec)
        for number, (steps, ranks) in enumerate(parts):
            what = ["resume", _run(home).name] if number else ["spec.yaml", "executor=local"]
            done = launch(home, *what, f"train.steps={steps}", f"resources.tasks_per_node={ranks}")
            assert done.returncode == 0, done.stderr
        newest = max((_run(home) / "checkpoints").glob("step-*"))
        manifest = json.loads((newest / "manifest.json").read_text())
        ledgers.append((manifest["step"], manifest["samples"], manifest["ledger"]))
        checked = launch(home, "verify", _run(home).name)
        assert checked.returncode == 0, checked.stdout
    assert ledgers[0] == ledgers[1]
    assert ledgers[0][:2] == (55, 55 * 24)  # of 1437 samples
    refused = launch(tmp_path / "changing", "resume", _run(tmp_path / "changing").name, "resources.tasks_per_node=5")
    assert (refused.returncode, "24 is no multiple of 5 ranks" in refused.stderr) == (2, True)


def test_an_attempt_gives_way_to_a_newer_one(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    child = subprocess.Popen(
        [LAUNCH, "spec.yaml", "executor=local", "train.steps=10000000"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert child.stdout is not None
    while not child.stdout.readline().startswith("step "):
        pass
    folder = RunFolder(_run(tmp_path))
    assert folder.take_attempt().number == 2
    shown, _ = child.communicate(timeout=60)
    assert child.returncode == 93, shown
    assert re.search("launch: attempt 1 gave way: .*attempt 2 of this run has begun, so this older one saves", shown)
    assert "Traceback" not in shown
    assert [json.loads(line)["cause"] for line in folder.attempts_jsonl.read_text().splitlines()] == ["superseded"]


def test_a_new_run_does_not_take_over_another_one_s_folder_of_checkpoints(tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    words = ("spec.yaml", "executor=local", "train.steps=10", "train.checkpoint.folder=ours")
    assert launch(tmp_path, *words).returncode == 0
    first = _run(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "ours").iterdir()}
    refused = launch(tmp_path, *words, "train.seed=3")
    assert refused.returncode == 2
    assert f"ours holds the checkpoints of the run {first.name}; give this run a folder of its own" in refused.stderr
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "ours").iterdir()} == before
    assert launch(tmp_path, "resume", first.name, "train.steps=15").returncode == 0


def test_checkpoints_that_the_ranks_do_not_share_are_refused_by_the_save(tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    words = ("train.steps=10", "train.checkpoint.folder=memory://x", "train.checkpoint.retries=0")
    done = launch(tmp_path, "spec.yaml", "executor=local", *words)
    assert done.returncode == 5
    assert "rank 0 does not see what another rank wrote; the folder of checkpoints must be one that all" in done.stderr


def test_a_resume_with_other_code_says_so_and_a_best_one_by_an_unknown_result_is_none(
    user: Path, launch: Launch
) -> None:
    done = launch(user, "spec.yaml", "train.checkpoint.keep_best=f1", "train.task=tasks:Measured")
    assert done.returncode == 0, done.stderr
    assert "train.checkpoint.keep_best: f1: no best one is kept" in done.stdout
    name = _run(user).name
    again = launch(user, "resume", name, "train.steps=9")
    assert "tasks.py is not what it was" not in again.stdout
    (user / "tasks.py").write_text((user / "tasks.py").read_text() + "\n# another\n")
    again = launch(user, "resume", name, "train.steps=10")
    assert "note   tasks.py is not what it was when step-000000009 was saved" in again.stdout
