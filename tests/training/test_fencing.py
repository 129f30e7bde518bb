"""Proves that an attempt which a newer one has replaced changes nothing any more that both would write."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD

from training.checkpoint import Checkpoints
from training.config import RunConfig, TrainConfig
from training.errors import Superseded
from training.metrics import Metrics
from training.ranks import Ranks
from training.runfolder import RunFolder
from training.shelf import Keep
from training.stop import StopFlag

CONFIG = RunConfig(name="run", train=TrainConfig(task="synthetic"))


class Attempt:
    """An attempt's checkpoints and metrics."""

    def __init__(self, folder: RunFolder) -> None:
        self.number = folder.take_attempt().number
        newer = lambda: folder.newer_attempt(self.number)  # noqa: E731
        self.stop = StopFlag()
        self.store = Checkpoints(str(folder.checkpoints), Keep(1), Ranks(), pauses_s=(60.0,), newer=newer)
        self.metrics = Metrics(folder, Ranks(), self.number, [], self.stop.ask)
        self.model = nn.Linear(2, 2)

    def save(self, step: int) -> None:
        self.store.save(step, step, self.model, SGD(self.model.parameters(), lr=0.1), CONFIG)


def test_only_the_newest_attempt_publishes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    older = Attempt(folder)
    older.save(1)
    newer = Attempt(folder)
    with pytest.raises(Superseded, match="attempt 2 of this run has begun, so this older one saves nothing and ends"):
        older.save(2)  # at once, without the tries that a full disk gets
    newer.save(3)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step-000000003"]


def test_an_older_attempt_leaves_a_newer_one_s_unfinished_save_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    older, _ = Attempt(folder), Attempt(folder)
    under_way = folder.checkpoints / ".step-000000009.abcd1234.tmp"
    under_way.mkdir(parents=True)
    with pytest.raises(Superseded):
        older.save(2)
    assert under_way.exists()


def test_an_attempt_replaced_in_the_middle_of_a_save_does_not_publish_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    store = Checkpoints(str(folder.checkpoints), Keep(1), Ranks(), newer=iter([None, 2]).__next__)
    model = nn.Linear(2, 2)
    with pytest.raises(Superseded):
        store.save(1, 1, model, SGD(model.parameters(), lr=0.1), CONFIG)
    assert not list(folder.checkpoints.iterdir())


def test_the_next_save_tells_of_it_when_the_last_was_not_waited_for(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    older, _ = Attempt(folder), Attempt(folder)
    optimizer = SGD(older.model.parameters(), lr=0.1)
    older.store.begin(1, 1, older.model, optimizer, CONFIG)
    with pytest.raises(Superseded):
        older.store.begin(2, 2, older.model, optimizer, CONFIG)


def test_metrics_of_an_older_attempt_end_and_ask_it_to_stop(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    older = Attempt(folder)
    older.metrics.write({"step": 1, "samples": 1})
    newer = Attempt(folder)
    older.metrics.write({"step": 2, "samples": 2})
    newer.metrics.write({"step": 2, "samples": 2})
    lines = folder.metrics.read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ['{"attempt": 1', '{"attempt": 2']
    assert (older.stop.asked, older.stop.reason, newer.stop.asked) == (True, "attempt 2 has begun", False)
