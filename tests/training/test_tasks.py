"""Proves the example tasks: their data are real and the same everywhere, their losses are sums with true weights.

pytest tests/training/test_tasks.py
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from training.errors import DataError
from training.tasks import OPTIONS
from training.tasks.digits import Digits
from training.tasks.synthetic import Synthetic
from training.tasks.text import Text

SMALL = {"context": 16, "width": 16, "depth": 1, "heads": 2, "max_bytes": 5000, "held_out_bytes": 500}


def test_digits_are_the_real_ones_split_1437_to_360() -> None:
    task = Digits()
    train, held_out = task.train_data(), task.eval_data()
    assert (len(train), len(held_out)) == (1437, 360)
    assert train.pixels.shape == (1437, 64)
    assert (float(train.pixels.min()), float(train.pixels.max())) == (0.0, 1.0)
    counts = torch.bincount(torch.cat([train.digits, held_out.digits]), minlength=10)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert train.digits[:10].tolist() == Digits().train_data().digits[:10].tolist()
    assert [tuple(p.shape) for p in task.model().parameters()] == [(256, 64), (256,), (10, 256), (10,)]


def test_digits_do_not_import_scikit_learn() -> None:
    code = "import sys; from training.tasks.digits import Digits; Digits(); sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_missing_digits_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'ddp-launcher\[examples\]'"):
        Digits()


def test_text_windows_overlap_by_one_byte_and_the_split_is_by_file() -> None:
    task = Text(**SMALL)  # type: ignore[arg-type]
    data = task.train_data()
    assert len(data) == (5000 - 1) // 16
    tokens, following = data.fetch(np.arange(3))
    assert (tokens.shape, tokens.dtype) == ((3, 16), torch.int64)
    assert torch.equal(tokens[0, 1:], following[0, :-1])
    assert torch.equal(tokens[1, 0], following[0, -1])
    last, _ = data.fetch(np.array([len(data) - 1]))
    assert last.shape == (1, 16)
    train, held_out = bytes(data.text), bytes(task.eval_data().text)
    assert b"import" in train
    assert held_out[:200] not in train


def test_the_transformer_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = Text(**SMALL).model()  # type: ignore[arg-type]
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9], after[:, 9])


@pytest.mark.parametrize(
    ("make", "weight", "loss"),
    [
        (Digits, 5, math.log(10)),
        (partial(Text, **SMALL), 5 * 16, math.log(256)),
        (partial(Synthetic, samples=20), 5, math.log(10)),
    ],
    ids=["digits", "text", "synthetic"],
)
def test_a_loss_is_a_sum_with_its_weight(make: Callable[[], Any], weight: int, loss: float) -> None:
    torch.manual_seed(0)
    task = make()
    model = task.model()
    total, counted = task.loss(model, task.train_data().fetch(np.arange(5)))
    assert (total.dim(), counted) == (0, weight)
    assert total.item() / counted == pytest.approx(loss, rel=0.1)  # an untrained model guesses
    assert counted / 5 == getattr(task, "weight_per_sample", 1.0)
    parts = [task.loss(model, task.train_data().fetch(np.array([i])))[0] for i in range(5)]
    torch.testing.assert_close(torch.stack(parts).sum(), total)


@pytest.mark.parametrize(("name", "task"), [("digits", Digits), ("text", Text), ("synthetic", Synthetic)])
def test_the_launcher_knows_every_option_of_a_built_in_task(name: str, task: type) -> None:
    hints = get_type_hints(task.__init__)
    parameters = list(inspect.signature(task).parameters)
    assert {parameter: hints[parameter] for parameter in parameters} == OPTIONS[name]
