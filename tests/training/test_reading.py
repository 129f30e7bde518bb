"""Proves that a run can begin with another run's weights: from a checkpoint, a folder of them or a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from training.checkpoint import Checkpoints
from training.config import RunConfig, TrainConfig
from training.errors import CheckpointError
from training.ranks import Ranks
from training.reading import init_from
from training.shelf import Keep

CONFIG = RunConfig(name="run", train=TrainConfig(task="synthetic"))


def saved(run: Path, steps: tuple[int, ...] = (3, 12)) -> nn.Module:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    store = Checkpoints(str(run / "checkpoints"), Keep(9), Ranks())
    for step in steps:
        with torch.no_grad():
            model.weight.fill_(step)
        store.save(step, step, model, optimizer, CONFIG)
    return model


@pytest.mark.parametrize(
    ("place", "value"),
    [("", 12.0), ("/", 12.0), ("/checkpoints", 12.0), ("/checkpoints/step-000000003", 3.0)],
)
def test_the_weights_come_and_nothing_else_changes(place: str, value: float, tmp_path: Path) -> None:
    saved(tmp_path / "run")
    model = nn.Linear(4, 2)
    name = init_from(f"{tmp_path}/run{place}", model, Ranks())
    assert model.weight.unique().tolist() == [value]
    assert name == f"{tmp_path}/run/checkpoints/step-{int(value):09d}"
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step-000000003", "step-000000012"]


def test_a_damaged_one_is_passed_over_and_left_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path)
    (tmp_path / "checkpoints/step-000000012/state.json").write_bytes(b"{}")
    model = nn.Linear(4, 2)
    init_from(str(tmp_path), model, Ranks())
    assert model.weight.unique().tolist() == [3.0]
    assert "step-000000012 is damaged" in capsys.readouterr().err
    assert (tmp_path / "checkpoints/step-000000012").is_dir()
    with pytest.raises(CheckpointError, match=r"train\.init_from: .*: the checkpoint is damaged"):
        init_from(f"{tmp_path}/checkpoints/step-000000012", model, Ranks())


def test_what_is_not_there_or_does_not_fit_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"train\.init_from: .*: no good checkpoint is there; give a run folder"):
        init_from(str(tmp_path), nn.Linear(4, 2), Ranks())
    saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not fit the model: weight: \(2, 4\) float32 in the checkpoint"):
        init_from(str(tmp_path), nn.Linear(5, 2), Ranks())
