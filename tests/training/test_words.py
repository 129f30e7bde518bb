"""Proves that a rank's words are written whole, and that a whole weight is read back whole from a mean over ranks.

pytest tests/training/test_words.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from training.errors import TrainingError
from training.words import Late, Own, Whole, total

FP32 = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("world_size", [1, 3, 7, 1000])
def test_a_whole_weight_is_read_back_whole(world_size: int) -> None:
    for weight in (1, 96, 4097, 2**24 - 1):
        mean = (torch.tensor(float(weight)) * torch.tensor(1.0 / world_size)).item()
        assert total(mean, world_size, FP32) == weight
    assert total(6.5 / world_size, world_size, FP32) == pytest.approx(6.5, rel=1e-15)
    assert total(0.0, world_size, FP32) == 0.0
    assert total(float("inf"), world_size, FP32) == float("inf")


def test_words_of_two_steps_stand_side_by_side() -> None:
    own = Own(torch.zeros(4))
    first = own.write(1, 4.0, False, torch.tensor(8.0))
    second = own.write(2, torch.tensor(5.0), True, torch.tensor(9.0))
    assert (first.tolist(), second.tolist()) == ([4.0, 0.0, 8.0, 0.0], [5.0, 1.0, 9.0, 0.0])
    assert (own.loss(1).item(), own.loss(2).item()) == (8.0, 9.0)
    assert own.write(3, 4.0, True, torch.tensor(7.0)).tolist() == [4.0, 1.0, 7.0, 0.0]
    assert own.write(4, 5.0, False, torch.tensor(7.0)).tolist() == [5.0, 0.0, 7.0, 0.0]


def test_late_words_come_with_the_next_step() -> None:
    late = Late(torch.zeros(4))
    assert late.swap(1, 10, 0.1, torch.tensor([1.0, 2.0, 3.0, 0.0])) == []
    assert late.swap(2, 20, 0.2, torch.tensor([4.0, 5.0, 6.0, 1.0])) == [(1, 10, 0.1, 1.0, 2.0, 3.0, 0.0)]
    assert late.drain() == [(2, 20, 0.2, 4.0, 5.0, 6.0, 1.0)]
    assert late.drain() == []


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.tensor(1.0), r"one tensor of shape \(\)"),
        (3, "a value of type int"),
        ((torch.tensor(1.0), 1, 2), r"\(Tensor, int, int\)"),
        ((1.0, 2), r"\(float, int\)"),
    ],
)
def test_a_loss_of_another_kind_is_told_in_words(returned: Any, words: str) -> None:
    class Task:
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return returned

    whole = Whole(Task(), nn.Linear(1, 1), torch.device("cpu"), False)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=f"the task's loss returned {words}; return two values"):
        whole(None)
