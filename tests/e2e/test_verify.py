"""Proves `launch verify` on real runs: killed and resumed, damaged, replayed bit for bit, and with tasks that do not
compute the same twice.

pytest tests/e2e/test_verify.py
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import xxhash

from launcher import executors
from launcher.host import HostJob
from launcher.script import Submission
from tests.e2e.conftest import LAUNCH, Launch, environment
from training.runfolder import RunFolder

TASK = '''
import os, time
import torch
from torch import nn

class Task:
    """Dropout, so that the random states of the ranks matter too."""
    def __init__(self, pause=0.0, chance=False):
        self.pause, self.chance = pause, chance
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    def train_data(self):
        x = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    def loss(self, model, batch):
        x, y = batch
        time.sleep(self.pause)
        if self.chance:
            y = y + int.from_bytes(os.urandom(1), "little") / 256
        return ((model(x) - y) ** 2).sum(), len(x)
'''
SPEC = """\
name: t
executor: local
resources: {nodes: 1, tasks_per_node: 2, time: "10"}
train:
  task: task:Task
  steps: 30
  batch: {global: 8}
  optim: {name: adamw, base_lr: 0.01}
  schedule: {warmup_steps: 4, decay: cosine}
  checkpoint: {every_steps: 5, keep_last: 3}
  log: {every_steps: 2}
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path


def _run_folder(user: Path) -> Path:
    (folder,) = (user / "runs").iterdir()
    return folder


def _start_again(folder: Path, user: Path) -> int:
    """What Slurm does to a job that it requeues, on this machine: one more attempt of the same run."""
    process = executors.start_local(Submission(RunFolder(folder), "token", user), HostJob(str(folder)))
    return process.wait(60)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_run_that_was_killed_damaged_and_resumed_still_proves_itself(user: Path, launch: Launch) -> None:
    killer = "import os, signal, pathlib\n" + TASK.replace(
        "        time.sleep(self.pause)\n",
        "        if any(pathlib.Path(os.environ['DDP_RUN_FOLDER']).glob('checkpoints/step-000000015')) "
        "and os.environ['DDP_ATTEMPT'] == '1':\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        time.sleep(self.pause)\n",
    )
    (user / "task.py").write_text(killer)
    assert launch(user, "spec.yaml", "train.options.pause=0.01").returncode == 5
    folder = _run_folder(user)
    assert _start_again(folder, user) == 0

    done = launch(user, "verify", folder.name, "--deep")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"run  {folder.name}  {folder}"
    assert lines[2].startswith("ok   samples      216 consumed in 4.32 epochs of 50, none lost and none twice")
    assert any(line.startswith("ok   metrics      15 training lines up to step 30") for line in lines)
    assert any(line.startswith("ok   attempts     2 attempts: failed, done; went on from step ") for line in lines)
    assert any(line.startswith("ok   replay       steps 25 to 30 on 2 ranks trained again") for line in lines)

    _flip(folder / "checkpoints/step-000000030/optimizer-00000.safetensors")
    done = launch(user, "verify", str(folder))
    assert done.returncode == 5
    assert f"BAD  checkpoints  {folder}/checkpoints/step-000000030/optimizer-00000.safetensors: " in done.stdout
    assert _start_again(folder, user) == 0
    begun = json.loads((folder / "attempts/0003/began.json").read_text())
    assert begun["set_aside"] == {
        "step-000000030.bad": "optimizer-00000.safetensors has another hash than its manifest says"
    }
    done = launch(user, "verify", str(folder))
    assert done.returncode == 0, done.stdout
    assert "step-000000030.bad was damaged, and set aside by a later attempt" in done.stdout
    assert "3 attempts: failed, done, done; went on from step" in done.stdout


def test_parameters_that_training_does_not_give_are_found_though_every_hash_is_right(
    user: Path, launch: Launch
) -> None:
    assert launch(user, "spec.yaml").returncode == 0
    folder = _run_folder(user)
    newest = folder / "checkpoints/step-000000030"
    _flip(newest / "model-00000.safetensors")
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["digest"]
    content = (newest / "model-00000.safetensors").read_bytes()
    manifest["files"]["model-00000.safetensors"]["xxh3_128"] = xxhash.xxh3_128_hexdigest(content)
    manifest["digest"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (newest / "manifest.json").write_text(json.dumps(manifest))

    assert launch(user, "verify", str(folder)).returncode == 0
    done = launch(user, "verify", str(folder), "--deep")
    assert done.returncode == 5
    assert f"BAD  replay       {newest}/model-00000.safetensors: " in done.stdout
    assert "in the replay (1 of " in done.stdout
    assert "two replays agree with each other" in done.stdout


def test_a_task_that_leaves_things_to_chance_is_said_to_be_one(user: Path, launch: Launch) -> None:
    assert launch(user, "spec.yaml", "train.options.chance=true").returncode == 0
    done = launch(user, "verify", str(_run_folder(user)), "--deep")
    assert done.returncode == 5
    assert "BAD  replay" in done.stdout
    assert "this task does not compute the same twice, so no replay can prove what it did" in done.stdout


def test_ctrl_c_ends_a_replay_and_leaves_nothing(user: Path, launch: Launch) -> None:
    assert launch(user, "spec.yaml", "train.steps=5").returncode == 0
    folder = _run_folder(user)
    (user / "task.py").write_text(TASK.replace("time.sleep(self.pause)", "time.sleep(1.0)"))
    temporary = user / "tmp"
    temporary.mkdir()
    run = subprocess.Popen(
        [LAUNCH, "verify", str(folder), "--deep"], env=environment(TMPDIR=str(temporary)), stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not any(temporary.glob("*/first/attempts/0001/rank-0000.log")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert list(temporary.glob("ddp-replay-*")) == []
    marks = [path for path in Path("/proc").glob("[0-9]*/environ") if str(temporary).encode() in _content(path)]
    assert marks == []


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
