"""Proves a whole run on real ranks: what it prints, writes and returns, how it stops, resumes and refuses.

pytest tests/training/test_run.py
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from training.assemble import total_steps
from training.config import TrainConfig
from training.errors import ConfigError, DataError, NotFinite
from training.loop import Outcome
from training.order import Order, Slots
from training.ranks import Ranks
from training.run import run
from training.runfolder import RunFolder
from training.schedule import BatchPlan
from training.stop import StopFlag
from training.tasks.synthetic import Synthetic

Gang = Callable[..., list[Any]]


class Watched(Synthetic):
    """Synthetic data with a held-out part; can send its own rank a signal, or spoil a loss, at a given batch."""

    def __init__(
        self, signal_at: int = 0, signal_rank: int = 0, spoil_at: int = 0, in_evaluation: bool = False
    ) -> None:
        super().__init__(samples=100, features=6, width=8)
        self._at, self._rank, self._spoil, self._in_evaluation = signal_at, signal_rank, spoil_at, in_evaluation
        self._batches = 0

    def eval_data(self) -> Any:
        return self.train_data()

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        if model.training != self._in_evaluation:
            self._batches += 1
            if self._batches == self._at and self._rank == int(os.environ.get("RANK", "0")):
                os.kill(os.getpid(), signal.SIGTERM)
            if self._batches == self._spoil:
                return super().loss(model, batch)[0] * float("nan"), len(batch[1])
        return super().loss(model, batch)


SPEC: dict[str, Any] = {
    "task": f"{__name__}:Watched",
    "seed": 3,
    "epochs": 3,
    "batch": {"global": 12},
    "optim": {"base_lr": 0.01, "base_batch": 6},
    "schedule": {"warmup_steps": 2, "decay": "linear"},
    "checkpoint": {"every_steps": 10},
    "log": {"every_steps": 5},
    "eval": {"per_rank": 8},
}
TOTAL = 27
"""3 epochs of 100 samples in batches of 12."""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "a run"
    path.mkdir()
    return RunFolder(path)


def write(folder: RunFolder, **changes: Any) -> None:
    folder.spec.write_text(yaml.safe_dump({"name": "test", "train": {**SPEC, **changes}}))


def records(folder: RunFolder, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def _go(ranks: Ranks, path: Path, attempt: int) -> Outcome:
    return run(RunFolder(path), ranks, attempt)


def test_a_run_alone_prints_its_arithmetic_and_keeps_its_metrics(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder)
    outcome = run(folder, Ranks(), 1)
    assert (outcome.kind, outcome.step, outcome.samples) == ("done", TOTAL, 300)
    shown = capsys.readouterr().out
    assert "batch  12 per rank x 1 accumulation x 1 rank = 12\n" in shown
    assert "lr     0.01 x 12/6 = 0.02, warmup 2 steps, linear to 0 at step 27\n" in shown
    assert "ranks  1 on cpu, fp32, 100 samples\n" in shown
    assert re.search(r"step 27/27  loss \d", shown)
    assert f"step 27  test loss {outcome.metrics['loss']:.4f}\n" in shown
    trained = records(folder, "train")
    assert [line["step"] for line in trained] == [5, 10, 15, 20, 25, 27]
    assert [line["samples"] for line in trained] == [60, 112, 172, 224, 284, 300]
    assert trained[0]["lr"] == pytest.approx(0.02 * (1 - 2 / 25))
    (evaluated,) = records(folder, "eval")
    assert evaluated["step"] == TOTAL
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == [f"step-{step:09d}" for step in (10, 20, 27)]


def test_ranks_report_the_loss_of_the_whole_batch(folder: RunFolder, tmp_path: Path, gang: Gang) -> None:
    write(folder)
    run(folder, Ranks(), 1)
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    write(other, data={"workers": 1})
    answers = gang(3, _go, other.path, 1)
    assert [outcome.kind for outcome in answers] == ["done"] * 3
    for alone, together in zip(records(folder, "train"), records(other, "train"), strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert together["lr"] == alone["lr"]
    for outcome in answers:
        assert outcome.metrics == pytest.approx({"loss": records(folder, "eval")[0]["loss"]}, rel=1e-4)


def test_a_finished_run_is_done_at_once_and_an_evaluation_that_is_missing_is_made(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder)
    first = run(folder, Ranks(), 1)
    again = run(folder, Ranks(), 2)
    assert again == first
    assert len(records(folder, "eval")) == 1
    kept = [line for line in folder.metrics.read_text().splitlines() if '"eval"' not in line]
    folder.metrics.write_text("\n".join(kept) + '\n{"torn')
    third = run(folder, Ranks(), 3)
    assert third == first
    assert "resume step-000000027: step 27/27, 300 samples seen" in capsys.readouterr().out


def test_a_signal_on_one_rank_stops_all_at_one_step_and_the_run_goes_on_at_another_size(
    folder: RunFolder, tmp_path: Path, gang: Gang
) -> None:
    write(folder, options={"signal_at": 7, "signal_rank": 1})
    answers = gang(2, _go, folder.path, 1)
    # The signal comes while step 7 computes, so step 8 is the first that begins with it.
    assert [(o.kind, o.step, o.samples, o.reason) for o in answers] == [
        ("stopped", 8, 96, ""),
        ("stopped", 8, 96, "SIGTERM"),
    ]
    write(folder)
    resumed = gang(3, _go, folder.path, 2)
    assert [(o.kind, o.step, o.samples) for o in resumed] == [("done", TOTAL, 300)] * 3
    whole = RunFolder(tmp_path / "whole")
    whole.path.mkdir()
    write(whole)
    run(whole, Ranks(), 1)
    wanted = {line["step"]: line["loss"] for line in records(whole, "train")}
    for line in records(folder, "train"):
        if line["step"] in wanted:
            assert line["loss"] == pytest.approx(wanted[line["step"]], rel=1e-4)


def test_a_signal_during_evaluation_stops_there_and_only_the_evaluation_is_left(folder: RunFolder) -> None:
    write(folder, options={"signal_at": 3, "in_evaluation": True})
    stopped = run(folder, Ranks(), 1)
    assert (stopped.kind, stopped.step, stopped.metrics, stopped.reason) == ("stopped", TOTAL, {}, "SIGTERM")
    write(folder)
    done = run(folder, Ranks(), 2)
    assert (done.kind, done.step, list(done.metrics)) == ("done", TOTAL, ["loss"])
    assert [line["attempt"] for line in records(folder, "eval")] == [2]


def test_a_stop_that_was_asked_for_at_the_start_trains_nothing(folder: RunFolder) -> None:
    write(folder)
    stop = StopFlag()
    stop.ask("a test")
    assert run(folder, Ranks(), 1, stop) == Outcome("stopped", 0, 0, {}, "a test")
    assert not folder.checkpoints.exists() or not list(folder.checkpoints.iterdir())


def test_a_loss_that_is_no_number_is_an_error_and_is_not_saved(folder: RunFolder) -> None:
    write(folder, options={"spoil_at": 20})
    with pytest.raises(NotFinite, match="step 20: the loss on rank 0 is nan"):
        run(folder, Ranks(), 1)
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step-000000010"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"schedule": {"warmup_steps": 30}}, ConfigError, "30 steps of warmup do not fit into a run of 27 steps"),
        ({"batch": {"global": 200}, "data": {"last": "drop"}}, ConfigError, "drop leaves nothing of 100 samples"),
        ({"steps": 5}, ConfigError, "epochs is 3 and steps is 5; give one of them"),
        ({"epochs": None}, ConfigError, "epochs is None and steps is None"),
        ({"epochs": 0}, ConfigError, "make no step"),
        ({"task": "synthetic", "options": {"samples": 0}}, DataError, "its training data has no sample"),
        ({"device": "cuda"}, ConfigError, "train.device: cuda, but this rank sees no CUDA device"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    folder: RunFolder, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    if "device" in changes and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    write(folder, **changes)
    with pytest.raises(error, match=message):
        run(folder, Ranks(), 1)


def test_another_global_batch_than_the_checkpoint_s_is_refused(folder: RunFolder, gang: Gang) -> None:
    write(folder, batch={"per_rank": 6})
    gang(2, _go, folder.path, 1)
    with pytest.raises(
        ConfigError, match=r"with a global batch of 12; 6 per rank x 1 accumulation x 1 ranks make it 6"
    ):
        run(folder, Ranks(), 2)


def test_steps_of_a_run() -> None:
    slots = Slots(Order(100, 0), BatchPlan(12, 1, 1), 0)
    assert total_steps(TrainConfig(epochs=2), slots) == 18
    assert total_steps(TrainConfig(steps=5), slots) == 5
