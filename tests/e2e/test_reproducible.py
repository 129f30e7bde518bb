"""Proves, with the command itself, that a reproducible run has the same bits whatever ranks it was run and resumed on.

pytest tests/e2e/test_reproducible.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from .conftest import Launch

TASK = '''
import os
import torch
from torch import nn

class Points:
    """A batch begins at another place in memory on each rank, which a matrix product's last bits may hang on."""
    def __init__(self, count):
        self.x = torch.randn(count, 64, generator=torch.Generator().manual_seed(count))
    def __len__(self):
        return len(self.x)
    def fetch(self, indices):
        x = self.x[torch.from_numpy(indices)]
        start = int(os.environ["RANK"])
        moved = torch.empty(x.numel() + start)[start:].view_as(x).copy_(x)
        return moved, x.sum(1, keepdim=True)

class Task:
    """Batch norm and dropout: a forward pass changes buffers and draws."""
    def model(self):
        return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Linear(32, 1))
    def train_data(self):
        return Points(58)
    def eval_data(self):
        return Points(15)
    def loss(self, model, batch):
        x, y = batch
        return ((model(x) - y) ** 2).sum(), len(x)
'''
SPEC = """\
name: t
executor: local
resources: {tasks_per_node: 4}
train:
  task: task:Task
  reproducible: true
  steps: 7
  batch: {per_rank: 2, global: 8}
  optim: {name: adamw, base_lr: 0.01, clip_norm: 1.0}
  log: {every_steps: 1}
  eval: {per_rank: 2}
"""


def _tensors(run: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint, whichever rank wrote it."""
    found: dict[str, bytes] = {}
    for path in max((run / "checkpoints").glob("step-*")).glob("*.safetensors"):
        with safe_open(path, "numpy") as file:  # type: ignore[no-untyped-call]
            names = list(file.keys())
            found |= {f"{path.name.split('-')[0]}/{name}": file.get_tensor(name).tobytes() for name in names}
    return found


def _values(run: Path, kind: str, *names: str) -> list[list[Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[record[name] for name in names] for record in records if record["kind"] == kind]


@pytest.mark.slow
def test_a_run_that_moves_from_4_to_1_to_2_ranks_has_the_bits_of_one_that_stayed(
    tmp_path: Path, launch: Launch
) -> None:
    runs = {}
    for name in ("stays", "moves"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.py").write_text(TASK)
        (tmp_path / name / "spec.yaml").write_text(SPEC)
        ranks = ("resources.tasks_per_node=1", "train.steps=18") if name == "stays" else ()
        done = launch(tmp_path / name, "spec.yaml", *ranks)
        assert done.returncode == 0, done.stderr
        assert "bits   the same on each number of ranks that divides 4, with 2 per rank" in done.stdout
        (runs[name],) = (tmp_path / name / "runs").iterdir()
    home, moved = tmp_path / "moves", runs["moves"].name
    for change, text in (
        ("resources.tasks_per_node=3", "train.batch.global: 8 is no multiple of 2 per rank x 3 ranks = 6"),
        ("train.batch.per_rank=1", "train.batch.per_rank: 2 -> 1: its steps up to now were made otherwise"),
        ("train.reproducible=false", "train.reproducible: True -> False: its steps"),
    ):
        refused = launch(home, "resume", moved, "train.steps=18", change)
        assert refused.returncode == 2
        assert text in refused.stderr
    for ranks, steps in ((1, 11), (2, 18)):
        done = launch(home, "resume", moved, f"train.steps={steps}", f"resources.tasks_per_node={ranks}")
        assert done.returncode == 0, done.stderr
        assert "bits   the same on each number of ranks that divides 4" in done.stdout
    assert len(_tensors(runs["stays"])) == 6 + 3 + 3 * 6  # parameters, batch norm's buffers, and what AdamW keeps
    assert _tensors(runs["moves"]) == _tensors(runs["stays"])
    losses = [_values(run, "train", "step", "samples", "loss") for run in (runs["moves"], runs["stays"])]
    assert losses[0] == losses[1] and len(losses[0]) == 18
    evaluated = [_values(run, "eval", "step", "loss")[-1] for run in (runs["moves"], runs["stays"])]
    assert evaluated[0] == evaluated[1]
    assert launch(home, "verify", moved).returncode == 0
