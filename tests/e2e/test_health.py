"""Proves what becomes of a run that is not well: hanging, not finite, ranks that drifted apart.

python -m pytest tests/e2e/test_health.py
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Launch, environment

TASKS = '''
"""Tasks of a user that go wrong at the fifth batch, on rank 1 alone."""
import os, time
from torch import nn
from tasks import Good

class At5(Good):
    def __init__(self, **options):
        super().__init__(**options)
        self.batches = 0
    def loss(self, model, batch):
        self.batches += 1
        loss, weight = super().loss(model, batch)
        if self.batches == 5 and os.environ["RANK"] == "1":
            return self.wrong(model, loss), weight
        return loss, weight

class Hangs(At5):
    def wrong(self, model, loss):
        stuck_for_ever()

def stuck_for_ever():
    time.sleep(3600)

class Nan(At5):
    def wrong(self, model, loss):
        return loss * float("nan")

class Drifts(At5):
    def wrong(self, model, loss):
        model.weight.data[0, 0] += 1e-3
        return loss
'''


@pytest.fixture
def folder(user: Path) -> Path:
    (user / "ill.py").write_text(TASKS)
    return user


def run_folder(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def check_the_hang(attempt: Path, errors: str) -> None:
    here = socket.gethostname()
    assert "stuck_for_ever" in (attempt / "stacks-rank-0001.txt").read_text()
    assert "step.py" in (attempt / "stacks-rank-0000.txt").read_text()
    records = [json.loads((attempt / f"failure-000{rank}.json").read_text()) for rank in (0, 1)]
    assert [(record["exception"], record["host"], record["exit_code"]) for record in records] == [
        ("Hang", here, 94)
    ] * 2
    assert "it timed out where ranks wait for each other" in records[0]["text"]
    assert "it stands in stuck_for_ever" in records[1]["text"]
    assert "it stands in stuck_for_ever" in errors


def test_a_hang_ends_the_attempt_and_names_the_rank_that_hangs(folder: Path, launch: Launch) -> None:
    done = launch(folder, "spec.yaml", "train.task=ill:Hangs", "train.health.hang_timeout_s=3")
    attempt = run_folder(folder) / "attempts/0001"
    assert done.returncode == 5, done.stderr
    check_the_hang(attempt, done.stderr)
    assert f"attempt 1 hung: rank 1 on {socket.gethostname()}: Hang: no step came to its end for 3 s" in done.stderr
    result = json.loads((attempt / "result.json").read_text())
    assert (result["cause"], result["rank"]) == ("hang", 1)
    assert result["log"] == str(attempt / "stacks-rank-0001.txt")
    assert json.loads((run_folder(folder) / "attempts.jsonl").read_text())["cause"] == "hang"


def test_a_hang_under_torchrun_ends_it_too(folder: Path) -> None:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node=2", "--rdzv-backend=c10d"]
    options = ["spec.yaml", "train.task=ill:Hangs", "train.health.hang_timeout_s=3"]
    command = [*torchrun, "--rdzv-endpoint=localhost:0", "-m", "training", *options]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    check_the_hang(run_folder(folder) / "attempts/0001", done.stderr)


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_folder(folder) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_a_bad_step_is_skipped_and_said(folder: Path, launch: Launch) -> None:
    done = launch(folder, "spec.yaml", "train.task=ill:Nan", "train.health.not_finite=skip")
    assert done.returncode == 0, done.stderr
    (record,) = metrics(folder, "health")
    said = f"step 5 is skipped: the loss on rank 1 is nan (host {socket.gethostname()})"
    assert (record["step"], record["event"], record["text"]) == (5, "skip", said)
    assert f"{said} (9 more may follow)" in done.stdout
    losses = [line["loss"] for line in metrics(folder, "train")]
    assert len(losses) == 8 and losses[4] == "NaN"
    assert losses[-1] < losses[0]


def test_ranks_that_drifted_apart_stop_the_run_before_it_saves(folder: Path, launch: Launch) -> None:
    done = launch(folder, "spec.yaml", "train.task=ill:Drifts", "train.health.replica_every_steps=4")
    assert done.returncode == 5, done.stderr
    ranks = ", ".join(f"rank {rank} (host {socket.gethostname()})" for rank in (0, 1))
    assert f"step 8: the parameters of {ranks} differ from each other, and no majority agrees, in weight" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((run_folder(folder) / "checkpoints").glob("step-*"))
