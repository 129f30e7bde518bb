"""Shared by the end-to-end tests: a user's folder, with tasks that work and tasks that fail, and the command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LAUNCH = Path(sys.executable).parent / "launch"
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

TASKS = '''
"""Tasks of a user: each is a small regression that goes well or fails in a way of its own."""
import os, signal, time
import torch
from torch import nn

class Good:
    def __init__(self, samples=64, pause=0.0):
        self.samples, self.pause = samples, pause
    def model(self):
        return nn.Linear(4, 1)
    def train_data(self):
        x = torch.randn(self.samples, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    def loss(self, model, batch):
        x, y = batch
        self.step(x)
        return ((model(x) - y) ** 2).sum(), len(x)
    def step(self, x):
        time.sleep(self.pause)

class Raises(Good):
    def step(self, x):
        if os.environ["RANK"] == "1":
            raise ValueError("the user's own fault, with 50% and 'quotes'")

class Dies(Good):
    def step(self, x):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

class Exits(Good):
    def step(self, x):
        if os.environ["RANK"] == "1":
            raise SystemExit(7)

class ExitsWell(Good):
    def step(self, x):
        if os.environ["RANK"] == "1":
            raise SystemExit(0)

class Vanishes(Good):
    def step(self, x):
        if os.environ["RANK"] == "1":
            os._exit(0)

class AllVanish(Good):
    def step(self, x):
        os._exit(0)

class Interrupted(Good):
    def step(self, x):
        if os.environ["RANK"] == "1":
            raise KeyboardInterrupt

class HangsAtExit(Good):
    def step(self, x):
        import threading
        threading.Thread(target=time.sleep, args=(3600,)).start()  # not a daemon: Python would wait for it

class Measured(Good):
    def eval_data(self):
        return self.train_data()

class Nan(Good):
    def loss(self, model, batch):
        loss, weight = super().loss(model, batch)
        return (loss * float("nan") if os.environ["RANK"] == "1" else loss), weight
'''
SPEC = """\
name: t
executor: local
resources: {nodes: 1, tasks_per_node: 2, time: "10"}
train:
  task: tasks:Good
  steps: 8
  batch: {per_rank: 4}
  optim: {name: sgd, base_lr: 0.01}
  log: {every_steps: 1}
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A user's folder: tasks.py and spec.yaml."""
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, without what would change where a run goes or how it reports."""
    gone = ("SLURM_CONF", "WANDB_API_KEY", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in gone}
    return env | extra


@pytest.fixture
def launch() -> Launch:
    """`launch(folder, *arguments, env=...)`: run the command to its end."""

    def run(
        folder: Path, *arguments: str, env: dict[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [LAUNCH, *arguments],
            cwd=folder,
            env=environment() if env is None else env,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
