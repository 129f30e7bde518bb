"""Proves what virtual ranks promise beside equal bits: alike beginnings, buffers of the first micro-batch, every wish.

pytest tests/training/test_virtual.py
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from training.config import BatchConfig, OptimConfig, TrainConfig
from training.deterministic import explained
from training.errors import ConfigError, NotFinite, TrainingError
from training.loader import Step
from training.optim import build
from training.order import Share
from training.ranks import Ranks
from training.run import process_group
from training.step import Stepper
from training.virtual import key

Gang = Callable[..., list[Any]]
CPU = torch.device("cpu")


class Drawing:
    """Loss w x. What its model saw last is kept in a buffer, and what it drew in `drawn`."""

    def __init__(self, part: Callable[[], nn.Module] | None = None) -> None:
        self.drawn: list[tuple[float, float, float]] = []
        self._part = part

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        model.register_buffer("last", torch.zeros((), dtype=torch.float64))
        if self._part is not None:
            model.part = self._part()
        return model

    def train_data(self) -> None: ...

    def loss(self, model: Any, batch: Tensor) -> tuple[Tensor, float]:
        self.drawn.append((random.random(), float(np.random.random_sample()), float(torch.rand(()))))
        model.last += batch.sum()
        return model(batch).sum(), len(batch)


def stepper(ranks: Ranks, task: Any, accumulate: int) -> tuple[Stepper, Any]:
    config = TrainConfig(
        reproducible=True,
        seed=5,
        batch=BatchConfig(per_rank=1, accumulate=accumulate),
        optim=OptimConfig(name="sgd"),
    )
    model = task.model()
    return Stepper(task, model, build(config.optim, model.parameters(), 1.0), config, ranks, CPU), model


def given(values: list[float], total: int) -> Step:
    """Micro-batches of one sample each; none of its own makes a rank idle, on a batch that does not count."""
    batches = [torch.tensor([[value]]) for value in values or [1e9]]
    return Step(batches, not values, total, total, Share([], not values, total, total, 0))


def test_a_step_by_hand() -> None:
    step, model = stepper(Ranks(), Drawing(), 4)
    (reading,) = step.step(1, given([1.0, 2.0, 3.0, 6.0], 4), lr=0.1, stop=True)
    assert (reading.loss, reading.stop) == (3.0, True)
    assert model.weight.item() == pytest.approx(1 - 0.1 * 3.0)
    assert model.last == 1.0  # the first micro-batch's, and each began with what the step began with
    assert model.weight.grad is None


def test_random_numbers_are_keyed_by_seed_step_and_micro_batch() -> None:
    task = Drawing()
    step, _ = stepper(Ranks(), task, 2)
    random.seed(1)
    for number in (1, 2, 1):
        step.step(number, given([1.0, 2.0], 2), lr=0.0, stop=False)
    assert task.drawn[:2] == task.drawn[4:]
    assert len(set(task.drawn[:4])) == 4
    torch.manual_seed(key(5, 2, 1))
    assert task.drawn[3][2] == float(torch.rand(()))
    assert len({key(5, 2, 1), key(6, 2, 1), key(5, 3, 1), key(5, 2, 0)}) == 4
    assert 0 <= key(5, 2, 1) < 2**63


def _tail(ranks: Ranks) -> tuple[list[bool], float, float]:
    """Rank 2 has no sample and asks to stop in the first of two steps."""
    with process_group(ranks, CPU):
        step, model = stepper(ranks, Drawing(), 1)
        data = given([[2.0], [4.0], []][ranks.rank], 2)
        stops = [step.step(n, data, 0.0, stop=(ranks.rank, n) == (2, 1))[0].stop for n in (1, 2)]
        (reading,) = step.step(3, data, 0.5, stop=False)
        return stops, reading.loss, model.last.item()


def test_a_rank_without_a_sample_adds_nothing_but_its_wish_to_stop(gang: Gang) -> None:
    assert gang(3, _tail) == [([True, False], 3.0, 6.0)] * 3


def _own_ways(ranks: Ranks) -> tuple[float, float]:
    """Each rank begins with a model of its own."""
    with process_group(ranks, CPU):

        class Own(Drawing):
            def model(self) -> nn.Module:
                model: Any = super().model()
                nn.init.constant_(model.weight, 3.0 + ranks.rank)
                model.last.fill_(ranks.rank)
                return model

        _, model = stepper(ranks, Own(), 1)
        return model.weight.item(), model.last.item()


def test_all_ranks_begin_with_rank_0_s_model(gang: Gang) -> None:
    assert gang(3, _own_ways) == [(3.0, 0.0)] * 3


def _other_forms(ranks: Ranks) -> str:
    with process_group(ranks, CPU):
        with pytest.raises(TrainingError) as caught:
            stepper(ranks, Drawing(lambda: nn.Linear(1, 1 + ranks.rank // 2)), 1)
        return str(caught.value)


def test_models_of_other_forms_are_told(gang: Gang) -> None:
    text = "the models of ranks 0 and 2 differ in form, first in part.weight; model() has to make the same one on each"
    assert gang(3, _other_forms) == [f"{text} rank"] * 3


def _spoilt(ranks: Ranks) -> tuple[str, int | None]:
    with process_group(ranks, CPU):
        step, _ = stepper(ranks, Drawing(), 2)
        values = [[1.0, 2.0], [float("nan"), 4.0]][ranks.rank]
        with pytest.raises(NotFinite) as caught:
            step.step(1, given(values, 4), lr=0.1, stop=False)
        return caught.value.what, caught.value.rank


def test_the_rank_of_a_spoilt_micro_batch_is_named(gang: Gang) -> None:
    assert gang(2, _spoilt) == [("the loss", 1)] * 2


def test_a_parameter_without_a_gradient_is_named_in_any_step() -> None:
    class Fickle(Drawing):
        def loss(self, model: Any, batch: Tensor) -> tuple[Tensor, float]:
            found, count = super().loss(model, batch)
            return found + (model.part(batch).sum() if float(batch) < 5 else 0.0), count

    step, _ = stepper(Ranks(), Fickle(lambda: nn.Linear(1, 1)), 1)
    step.step(1, given([1.0], 1), lr=0.0, stop=False)
    with pytest.raises(TrainingError, match=r"step 2 gave no gradient to part\.weight, part\.bias; freeze them"):
        step.step(2, given([7.0], 1), lr=0.0, stop=False)


def test_means_over_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        stepper(Ranks(), Drawing(lambda: nn.SyncBatchNorm(1)), 1)
    assert str(caught.value).startswith(
        "train.reproducible: module 'part' of the model is a SyncBatchNorm, whose means"
    )


def test_an_operation_without_a_deterministic_kernel_is_named() -> None:
    """Torch's words, of 2.13; on the CPU all operations have one."""
    words = (
        "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation, or ..."
    )
    with pytest.raises(TrainingError) as caught, explained():
        raise RuntimeError(words)
    assert str(caught.value) == (
        "train.reproducible: true, but cumsum_cuda_kernel does not have a deterministic implementation; "
        "compute it in another way, or set it false"
    )
    with pytest.raises(RuntimeError, match="my own"), explained():
        raise RuntimeError("my own deterministic error")
