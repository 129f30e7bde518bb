"""Proves that `launch drill` certifies a job that a resume brings back to the bit, and finds out jobs that it does not.

python -m pytest tests/e2e/test_drill.py
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .conftest import LAUNCH, Launch, environment

TASKS = '''
"""Tasks of a user: one that is sound, one that no two runs of are the same, one that forgets when it is resumed."""
import os
import torch
from torch import nn

class Sound:
    """Dropout, so that the random states of the ranks matter too."""
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.25), nn.Linear(8, 1))
    def train_data(self):
        x = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    def loss(self, model, batch):
        x, y = batch
        return ((model(x) - y) ** 2).sum(), len(x)

class Chance(Sound):
    def loss(self, model, batch):
        loss, weight = super().loss(model, batch)
        return loss * (1.0 + int.from_bytes(os.urandom(1), "little") / 1024), weight

class Forgets(Sound):
    """Its losses hang on a counter that no checkpoint holds."""
    calls = 0
    def loss(self, model, batch):
        loss, weight = super().loss(model, batch)
        self.calls += 1
        return loss * (1.0 + self.calls / 64), weight
'''
SPEC = """\
name: t
resources: {tasks_per_node: 2}
train:
  task: mine:Sound
  epochs: 40
  batch: {per_rank: 2, accumulate: 2}
  optim: {name: adamw, base_lr: 0.01}
  schedule: {warmup_steps: 100, decay: cosine}
  data: {workers: 1}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(TASKS)
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path


def certificate(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The only drill's folder, and what its certificate says."""
    (home,) = (folder / "runs").iterdir()
    return home, json.loads((home / "certificate.json").read_text())


@pytest.mark.slow
def test_a_sound_job_gets_its_certificate(folder: Path, launch: Launch) -> None:
    done = launch(folder, "drill", "spec.yaml", "--kills", "5", "--seed", "5", "--steps", "24", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    home, found = certificate(folder)
    assert (found["exit_code"], found["verdict"], found["ranks"]) == (0, "everything held", 2)
    assert found["command"] == "launch drill spec.yaml --kills 5 --seed 5 --steps 24"
    assert [(check["name"], check["holds"]) for check in found["checks"]] == [
        ("repeatable", True),
        ("same ranks", True),
        ("other ranks", True),
    ]
    assert [fault["planned"]["number"] for fault in found["faults"]] == [1, 2, 3, 4, 1]
    assert all(fault["happened"] is not None for fault in found["faults"]), found["faults"]
    assert [run["run"] for run in found["runs"]] == ["calm", "calm-again", "same-ranks", "calm-other", "other-ranks"]
    assert found["runs"][4]["ranks"][0] == 2 and set(found["runs"][4]["ranks"][1:]) < {1, 2, 4}
    text = (home / "certificate.txt").read_text()
    assert text.splitlines()[2:] == done.stdout.splitlines()[-1 - len(text.splitlines()[2:]) : -1]
    assert not list(home.glob("*/*/checkpoints"))
    assert len(list(home.glob("*/*/metrics.jsonl"))) == 5


def test_a_job_that_is_not_repeatable_is_told_so_before_any_fault(folder: Path, launch: Launch) -> None:
    arguments = ("drill", "spec.yaml", "train.task=mine:Chance", "--kills", "4", "--seed", "1", "--steps", "8")
    done = launch(folder, *arguments)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "BAD  repeatable   step 1: loss is " in done.stdout
    assert "two undisturbed runs differ, so no run can be compared bit for bit" in done.stdout
    home, found = certificate(folder)
    assert [run["run"] for run in found["runs"]] == ["calm", "calm-again"]
    assert found["verdict"] == "it does not hold: see the line that begins with BAD"
    assert len(list(home.glob("*/*/checkpoints/step-000000008"))) == 2


@pytest.mark.slow
def test_a_job_that_keeps_state_beside_its_checkpoint_is_found_out(folder: Path, launch: Launch) -> None:
    arguments = ("drill", "spec.yaml", "train.task=mine:Forgets", "--kills", "2", "--seed", "2", "--steps", "16")
    done = launch(folder, *arguments)
    assert done.returncode == 5, done.stdout + done.stderr
    _, found = certificate(folder)
    assert [(check["name"], check["holds"]) for check in found["checks"]] == [
        ("repeatable", True),
        ("same ranks", False),
    ]
    first, last = found["checks"][1]["faults"]
    assert first.startswith("step ") and "loss is" in first and "in same-ranks (attempt 2" in first
    assert last.startswith("step-000000016/model-00000.safetensors: 0.")


def test_a_drill_that_is_interrupted_says_what_held_so_far(folder: Path) -> None:
    child = subprocess.Popen(
        [LAUNCH, "drill", "spec.yaml", "--steps", "8"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with child:
        assert child.stdout is not None
        shown = [child.stdout.readline() for _ in range(3)]
        assert shown[2].startswith("calm         8 steps on 2 ranks, undisturbed: ")
        child.send_signal(signal.SIGINT)
        rest = child.stdout.read()
        assert child.wait(60) == 130
    assert "verdict  interrupted: what is above held so far" in rest
    _, found = certificate(folder)
    assert found["checks"] == []


def test_a_command_cannot_be_rehearsed(folder: Path, launch: Launch) -> None:
    (folder / "spec.yaml").write_text("name: c\ncommand: [echo, hello]\n")
    done = launch(folder, "drill", "spec.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "launch: c: a drill compares checkpoints and losses, and a `command` has none that we know; "
        "give a spec with a `train` section\n"
    )
    for wrong, told in ((("--kills", "0"), "--kills: 0 rehearses nothing"), (("--steps", "x"), "invalid int value")):
        refused = launch(folder, "drill", "spec.yaml", *wrong)
        assert refused.returncode == 2
        assert told in refused.stderr
    assert not (folder / "runs").exists()
