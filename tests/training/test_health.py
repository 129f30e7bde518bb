"""Proves what becomes of a run with a bad sample: which steps count, which change something, how it is resumed.

One of 300 samples is not a number, so exactly one of the 25 steps of an epoch is bad. The model has dropout and a batch
norm: random states and running means have to come out right as well.

pytest tests/training/test_health.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from training import checkpoint
from training.assemble import assemble
from training.config import HealthConfig, RunConfig, TrainConfig, load
from training.device import open_device
from training.errors import NotFinite
from training.health import Health
from training.loop import Outcome
from training.metrics import Metrics
from training.order import Order
from training.ranks import Ranks
from training.run import run
from training.runfolder import AttemptFolder, RunFolder
from training.schedule import batch_plan, lr_at, scaled_lr
from training.shelf import Keep
from training.stop import StopFlag
from training.watchdog import Watchdog
from training.words import Reading

Gang = Callable[..., list[Any]]
SAMPLES, SEED, TOTAL = 300, 5, 25
BAD_STEP = 17


class Spoiled:
    """A regression; the sample that comes first in step BAD_STEP is not a number. Can ask for a stop at a step."""

    def __init__(self, stop_at: int = 0) -> None:
        self._left = stop_at

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def train_data(self) -> Any:
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        x[int(Order(SAMPLES, SEED).indices(0, 12 * (BAD_STEP - 1), 12 * BAD_STEP)[0])] = math.nan
        return torch.utils.data.TensorDataset(x, x.nan_to_num().sum(1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        self._left -= 1
        if self._left == 0:
            FLAG.ask("the test")
        return ((model(x) - y) ** 2).sum(), len(x)


FLAG = StopFlag()
SPEC: dict[str, Any] = {
    "task": f"{__name__}:Spoiled",
    "seed": SEED,
    "epochs": 1,
    "batch": {"global": 12},
    "optim": {"base_lr": 0.01, "name": "adamw"},
    "schedule": {"warmup_steps": 2, "decay": "linear"},
    "checkpoint": {"every_steps": 4, "keep_last": 4},
    "log": {"every_steps": 1},
}


def folder_of(path: Path, **changes: Any) -> RunFolder:
    path.mkdir(exist_ok=True)
    folder = RunFolder(path)
    folder.spec.write_text(yaml.safe_dump({"name": "test", "train": {**SPEC, **changes}}))
    return folder


def records(folder: RunFolder, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def _go(ranks: Ranks, path: Path, attempt: int) -> Outcome:
    FLAG.asked = False
    torch.set_num_threads(1)
    return run(RunFolder(path), ranks, attempt, FLAG)


def state_of(folder: RunFolder, step: int) -> dict[str, bytes]:
    place = folder.checkpoints / f"step-{step:09d}"
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != "manifest.json"}


def by_hand(folder: RunFolder, steps: list[int], start: int) -> None:
    """From the checkpoint of step `start` take only `steps`, each with its own batch and rate, and save as TOTAL."""
    config = load(folder.spec)
    plan = batch_plan(config.train.batch, 1)
    device = open_device("cpu", Ranks())
    with Watchdog(None, AttemptFolder(folder.path), Ranks()) as dog:
        job, found = assemble(config, folder, Ranks(), 1, StopFlag(), device, plan, dog)
    assert (found.step if found else 0) == start
    peak = scaled_lr(config.train.optim, 12)
    for step in steps:
        (data,) = job.loader.steps(job.slots, 12 * (step - 1), 1)
        job.stepper.step(step, data, lr_at(step - 1, peak, config.train.schedule, TOTAL), stop=False)
    job.checkpoints.save(TOTAL, 300, job.model, job.optimizer, config)


def test_a_skipped_step_counts_and_changes_nothing_but_the_count(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", health={"not_finite": "skip"})
    outcome = _go(Ranks(), folder.path, 1)
    assert (outcome.kind, outcome.step, outcome.samples) == ("done", TOTAL, SAMPLES)
    (record,) = records(folder, "health")
    assert (record["step"], record["samples"], record["event"]) == (BAD_STEP, 12 * BAD_STEP, "skip")
    assert record["text"].startswith(f"step {BAD_STEP} is skipped: the loss on rank 0 is nan (host ")
    trained = records(folder, "train")
    assert [line["step"] for line in trained] == list(range(1, TOTAL + 1))
    assert [line["step"] for line in trained if line["loss"] == "NaN"] == [BAD_STEP]
    manifest = json.loads((folder.checkpoints / f"step-{TOTAL:09d}/manifest.json").read_text())
    assert '"skips": 1' in json.dumps(manifest)
    other = folder_of(tmp_path / "other", health={"not_finite": "skip"})
    by_hand(other, list(range(1, TOTAL + 1)), 0)
    assert state_of(folder, TOTAL) == state_of(other, TOTAL)


def test_a_rollback_brings_an_older_state_back_and_goes_on_behind_the_bad_batch(tmp_path: Path) -> None:
    health = {"not_finite": "rollback", "rollback_steps": 6}
    folder = folder_of(tmp_path / "run", health=health, checkpoint={**SPEC["checkpoint"], "keep_every": 8})
    outcome = _go(Ranks(), folder.path, 1)
    assert (outcome.kind, outcome.step, outcome.samples) == ("done", TOTAL, SAMPLES)
    (record,) = records(folder, "health")
    assert (record["step"], record["event"]) == (BAD_STEP, "rollback")
    assert record["text"].endswith("; the state of step 8 is back, what steps 9 to 17 did is gone")
    other = folder_of(tmp_path / "other")
    other.checkpoints.mkdir()
    (folder.checkpoints / "step-000000008").rename(other.checkpoints / "step-000000008")
    by_hand(other, list(range(BAD_STEP + 1, TOTAL + 1)), 8)
    assert state_of(folder, TOTAL) == state_of(other, TOTAL)


@pytest.mark.parametrize("stop_at", [BAD_STEP - 2, BAD_STEP, BAD_STEP + 2])
def test_a_run_that_is_stopped_around_a_rollback_ends_as_the_unbroken_one(
    tmp_path: Path, gang: Gang, stop_at: int
) -> None:
    health = {"not_finite": "rollback", "rollback_steps": 3}
    whole, broken = folder_of(tmp_path / "whole", health=health), tmp_path / "broken"
    gang(2, _go, whole.path, 1)
    folder = folder_of(broken, health=health, options={"stop_at": stop_at})
    assert [outcome.kind for outcome in gang(2, _go, broken, 1)] == ["stopped"] * 2
    folder_of(broken, health=health)
    assert [outcome.step for outcome in gang(2, _go, broken, 2)] == [TOTAL] * 2
    assert state_of(whole, TOTAL) == state_of(folder, TOTAL)
    for run_folder in (whole, folder):
        manifest = json.loads((run_folder.checkpoints / f"step-{TOTAL:09d}/manifest.json").read_text())
        assert json.dumps({"skips": 1, "rollbacks": [[12, BAD_STEP]]}) in json.dumps(manifest)


def test_a_rollback_needs_a_checkpoint_that_is_old_enough(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", health={"not_finite": "rollback", "rollback_steps": 16})
    with pytest.raises(NotFinite, match=r"^step 17: and there is no checkpoint of step 1 or before to go back to: the"):
        _go(Ranks(), folder.path, 1)


def test_what_an_earlier_rollback_undid_is_no_place_to_go_back_to(tmp_path: Path) -> None:
    class Checkpoints:
        asked: Any = None

        def finish(self) -> None: ...

        def newest(self, wanted: Callable[[int], bool]) -> None:
            self.asked = [step for step in range(100) if wanted(step)]

    health = Health(
        HealthConfig(not_finite="rollback", rollback_steps=4),
        Metrics(RunFolder(tmp_path), Ranks(), 1, []),
        None,
        {"skips": 1, "rollbacks": [[40, 50]]},
    )
    health.note(Reading(56, 560, math.nan, 0.1, False, NotFinite(56, 0, math.nan)))
    checkpoints: Any = Checkpoints()
    with pytest.raises(NotFinite):
        health.roll_back(checkpoints, nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    assert checkpoints.asked == [*range(41), 50, 51, 52]


def test_too_many_bad_steps_end_the_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", health={"not_finite": "skip", "max_skips": 1}, epochs=2)
    with pytest.raises(NotFinite, match=r"^step \d+: after 1 such step \(train.health.max_skips\), the loss"):
        _go(Ranks(), folder.path, 1)
    assert len(records(folder, "health")) == 1


def _save_gate(ranks: Ranks, spoil: str, folder: Path) -> tuple[str, list[str]]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.full((2, 2), -math.inf))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    config = RunConfig(name="gate", train=TrainConfig(task="synthetic"))
    store = checkpoint.Checkpoints(str(folder), Keep(9), ranks)
    store.save(6, 60, model, optimizer, config)
    if spoil == "parameter":
        model[0].bias.data[1] = math.inf
    elif spoil == "optimizer":
        optimizer.state[model[0].weight]["exp_avg_sq"][1, 0] = math.inf
    else:
        model[1].running_mean[0] = math.nan  # type: ignore[index]
    store.begin(7, 70, model, optimizer, config)
    found = []
    for again in (store.finish, lambda: store.begin(8, 80, model, optimizer, config)):  # it is not forgotten
        with pytest.raises(NotFinite) as caught:
            again()
        found.append(caught.value.found)
    assert found[0] == found[1]
    return found[0], sorted(path.name for path in folder.iterdir())


def test_no_state_that_is_spoiled_is_kept(tmp_path: Path) -> None:
    for spoil, words in (
        ("parameter", "an element of 0.bias on rank 0 is inf (host "),
        ("optimizer", "an element of the optimizer's 0.weight:exp_avg_sq on rank 0 is inf"),
        ("buffer", "an element of 1.running_mean on rank 0 is nan"),
    ):
        found, left = _save_gate(Ranks(), spoil, tmp_path / spoil)
        assert found.startswith(words)
        assert left == ["step-000000006"]
