"""Proves that a spec's `task:` becomes a task, and that every mistake in it is told in one clear message.

pytest tests/training/test_task.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from training.config import TrainConfig
from training.errors import ConfigError
from training.task import load_task
from training.tasks.synthetic import Synthetic

SOURCE = """
import torch

class Mine:
    def __init__(self, width, depth=2):
        self.width = width
    def model(self):
        return torch.nn.Linear(self.width, 1)
    def train_data(self):
        return []
    def loss(self, model, batch):
        return model(batch).sum(), len(batch)

class NoLoss:
    def model(self): ...
    def train_data(self): ...

class Anything(Mine):
    def __init__(self, **options):
        self.options = options
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's package, on the import path under a name of this test's own."""
    name = "users_" + tmp_path.name.replace("-", "_")
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "mine.py").write_text(SOURCE)
    (folder / "broken.py").write_text("import there_is_no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_built_in_and_own_tasks(module: str) -> None:
    assert isinstance(load_task(TrainConfig(task="synthetic", options={"samples": 8})), Synthetic)
    mine = load_task(TrainConfig(task=f"{module}.mine:Mine", options={"width": 3}))
    assert mine.model().weight.shape == (1, 3)
    anything = load_task(TrainConfig(task=f"{module}.mine:Anything", options={"x": 1}))
    assert anything.options == {"x": 1}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("digitz", {}, r"train.task: 'digitz' is neither digits, text, synthetic nor .*; did you mean 'digits'\?"),
        ("{}.mine", {}, "is neither"),
        ("nowhere_at_all:Task", {}, "there is no module 'nowhere_at_all' on the import path"),
        ("{}.other:Task", {}, r"there is no module '.*\.other' on the import path"),
        ("{}.mine:Mime", {}, r"mine.py has no class 'Mime'; did you mean 'Mine'\?"),
        ("{}.mine:NoLoss", {}, "the class has no method loss"),
        ("{}.mine:Mine", {"with": 3}, r"train.options.with: .* has no such option; did you mean 'width'\?; it takes"),
        ("{}.mine:Mine", {}, "train.options.width: .* needs this option"),
        ("text", {"width": 30, "heads": 4}, "train.options.width: 30 is no multiple of heads: 4"),
    ],
)
def test_mistakes_are_named(module: str, task: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(TrainConfig(task=task.format(module), options=options))


def test_a_fault_inside_the_users_module_is_shown_as_it_is(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        load_task(TrainConfig(task=f"{module}.broken:Task"))
