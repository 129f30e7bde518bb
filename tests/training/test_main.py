"""Proves the entry point: `python -m training SPEC` alone and under torchrun, its run folder, and its exit codes.

pytest tests/training/test_main.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from training.__main__ import main
from training.runfolder import RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]
SPEC = """
name: entry
resources: {nodes: 1, tasks_per_node: 2}
python_path: [code]
train:
  task: users_entry_task:Mine
  steps: 6
  batch: {global: 4}
  log: {every_steps: 3}
"""
TASK = """
from training.tasks.synthetic import Synthetic

class Mine(Synthetic):
    def __init__(self):
        super().__init__(samples=18, features=4, width=4)
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no site file"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = tmp_path / "specs of mine"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "users_entry_task.py").write_text(TASK)
    (folder / "entry.yaml").write_text(SPEC)
    return folder / "entry.yaml"


def the_run() -> RunFolder:
    (path,) = Path("runs").iterdir()
    return RunFolder(path)


def test_alone(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(spec), "train.seed=5"]) == 0
    folder = the_run()
    assert folder.run_id.startswith("entry-")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert yaml.safe_load(folder.spec.read_text())["train"]["seed"] == 5
    assert folder.source.read_text() == SPEC
    assert json.loads(folder.overrides.read_text()) == ["train.seed=5"]
    last = folder.last_attempt()
    assert last is not None and last.number == 1
    shown = capsys.readouterr().out
    assert "note: resources ask for 2 ranks; here 1 run, as they were started\n" in shown
    assert "step 6/6" in shown


def test_an_existing_run_folder_is_resumed_and_another_spec_is_refused_there(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(spec), "--run-folder", "my run"]) == 0
    assert main([str(spec), "--run-folder", "my run"]) == 0
    assert "resume step-000000006: step 6/6" in capsys.readouterr().out
    assert main([str(spec), "train.steps=9", "--run-folder", "my run"]) == 2
    assert "differs from this spec; edit it there, or take a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "did you mean train.steps?"),
        ("train.task=nowhere_to_be_found:Mine", "there is no module 'nowhere_to_be_found'"),
        ("train.options={with: 3}", "has no such option"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    spec: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(spec), override]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_a_spec_with_a_command_is_sent_to_launch(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec.write_text("name: entry\ncommand: [echo, hello]\n")
    assert main([str(spec)]) == 2
    assert "there is no train section; run `launch " in capsys.readouterr().err


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "training"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_under_torchrun_one_folder_is_shared_and_a_mistake_is_said_once(spec: Path) -> None:
    good = torchrun(str(spec))
    assert good.returncode == 0, good.stderr
    assert good.stdout.count("batch  2 per rank x 1 accumulation x 2 ranks = 4\n") == 1
    assert the_run().metrics.exists()
    bad = torchrun(str(spec), "train.options={with: 3}")
    assert bad.returncode != 0
    assert (bad.stdout + bad.stderr).count("error: train.options.with") == 1
