"""Proves that a run that is killed again and again, in its saves too, ends bit for bit as one that never was.

A few kills run with the tests. 200 of them, in about half an hour on two idle cores:
DDP_KILLS=50 python -m pytest tests/e2e/test_kills.py
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import LAUNCH, environment

KILLS = int(os.environ.get("DDP_KILLS", "2"))
LONG_S = 200 + 20 * KILLS
"""Longest time that a run may take; a busy machine is slow."""
SPEC = """\
name: killed
executor: local
resources: {{tasks_per_node: {ranks}}}
train:
  task: digits
  steps: {steps}
  batch: {{global: 48}}
  optim: {{base_lr: 1.0e-3}}
  schedule: {{warmup_steps: 20, decay: cosine}}
  checkpoint: {{every_steps: 25, keep_last: 3}}
  log: {{every_steps: 20}}
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [LAUNCH, *arguments], cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def last(run: Path) -> dict[str, Any]:
    newest = max((run / "checkpoints").glob("step-*"))
    whole: dict[str, Any] = json.loads((newest / "manifest.json").read_text())
    return {key: whole[key] for key in ("step", "samples", "files", "ledger")}


def ranks_of(run: Path) -> list[int]:
    """Process ids of the ranks of the attempt that runs."""
    attempt = max((run / "attempts").glob("[0-9]*"))
    return [int(json.loads(path.read_text())["pid"]) for path in sorted(attempt.glob("env-*.json"))]


def kill(run: Path, child: subprocess.Popen[str], chance: random.Random) -> None:
    """SIGKILL one rank, all of them, or the process that minds them: at once, or when a save is under way."""
    if chance.random() < 0.5:
        deadline = time.monotonic() + 5
        while child.poll() is None and time.monotonic() < deadline:
            if any((run / "checkpoints").glob(".step-*.tmp")):
                break
    pids = ranks_of(run)
    attempt = max((run / "attempts").glob("[0-9]*"))
    host = int(json.loads((attempt / "host.json").read_text())["pid"])
    for pid in chance.choice([[chance.choice(pids)], pids, [host]]):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def disturbed(folder: Path, kills: int, seed: int) -> tuple[Path, int]:
    """Run to the end through so many kills; the run, and how many attempts it took."""
    chance = random.Random(seed)
    child = start(folder, "spec.yaml")
    for _ in range(kills):
        assert child.stdout is not None
        while (line := child.stdout.readline()) and not line.startswith("step "):
            pass
        time.sleep(chance.uniform(0.0, 0.4))
        run = run_of(folder)
        if child.poll() is None and line:
            kill(run, child, chance)
        with child:
            child.stdout.read()
        child = start(folder, "resume", run.name)
    shown, _ = child.communicate(timeout=LONG_S)
    assert child.returncode == 0, shown
    return run, len(list((run / "attempts").glob("[0-9]*")))


@pytest.mark.timeout(3 * LONG_S)
@pytest.mark.parametrize(("ranks", "seed"), [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_a_run_through_kills_ends_as_one_that_was_left_alone(ranks: int, seed: int, tmp_path: Path) -> None:
    text = SPEC.format(ranks=ranks, steps=400 * KILLS)
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.yaml").write_text(text)
    calm = start(tmp_path / "calm", "spec.yaml")
    shown, _ = calm.communicate(timeout=LONG_S)
    assert calm.returncode == 0, shown
    run, attempts = disturbed(tmp_path / "killed", KILLS, seed)
    assert attempts > KILLS / 2
    assert last(run) == last(run_of(tmp_path / "calm"))
    assert not list((run / "checkpoints").glob("*.bad*"))
    checked = subprocess.run(
        [LAUNCH, "verify", run.name],
        cwd=tmp_path / "killed",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
