"""Proves the step's promises beside equivalence: weights of any kind, agreed ends, faults that are explained.

pytest tests/training/test_step.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training.config import OptimConfig, TrainConfig
from training.errors import NotFinite, TrainingError
from training.loader import Step
from training.optim import build
from training.ranks import Ranks
from training.run import process_group
from training.step import Stepper
from training.words import Late

CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]
Gang = Callable[..., list[Any]]


class Line:
    """Weighted squares on a line without bias: everything can be worked out by hand. A batch is (x, weights)."""

    def __init__(self, extra: bool = False, find_unused_parameters: bool = False) -> None:
        self._extra = extra
        self.find_unused_parameters = find_unused_parameters

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        if self._extra:
            model.register_parameter("left_out", nn.Parameter(torch.zeros(2)))
        return model

    def train_data(self) -> None: ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        x, weights = batch
        return (weights * model(x)[:, 0] ** 2).sum(), weights.sum()


def batch(values: list[float], weights: list[float] | None = None) -> Batch:
    x = torch.tensor(values)
    return x[:, None], torch.ones_like(x) if weights is None else torch.tensor(weights)


def stepper(ranks: Ranks, task: Any, precision: str = "fp32", **optim: Any) -> tuple[Stepper, Any]:
    config = TrainConfig(
        precision=precision,  # type: ignore[arg-type]
        optim=OptimConfig(name="sgd", **optim),
    )
    model = task.model()
    return Stepper(task, model, build(config.optim, model.parameters(), 1.0), config, ranks, CPU), model


def test_a_step_by_hand() -> None:
    """Loss w^2 x^2: at w = 1 the mean over x = 1, 2, 3 is 14/3, its gradient 28/3."""
    step, model = stepper(Ranks(), Line())
    (reading,) = step.step(1, Step([batch([1.0, 2.0]), batch([3.0])], False, 3, 3), lr=0.03, stop=False)
    assert reading._replace(loss=0.0) == (1, 3, 0.0, 0.03, False)
    assert reading.loss == pytest.approx(14 / 3)
    assert model.weight.item() == pytest.approx(1 - 0.03 * 28 / 3)
    assert model.weight.grad is None
    assert step.flush() == []


def test_clipping_takes_the_norm_of_the_mean_gradient() -> None:
    for limit, moved in ((1.0, 1.0), (5.0, 5.0), (1000.0, 28 / 3)):
        step, model = stepper(Ranks(), Line(), clip_norm=limit)
        step.step(1, Step([batch([1.0, 2.0]), batch([3.0])], False, 3, 3), lr=0.01, stop=False)
        assert 1 - model.weight.item() == pytest.approx(0.01 * moved, rel=1e-5)


def test_the_words_do_not_reach_the_optimizer_or_the_model() -> None:
    step, model = stepper(Ranks(), Line())
    assert list(model.state_dict()) == ["weight"]
    step.step(1, Step([batch([1.0])], False, 1, 1), lr=0.0, stop=True)
    assert step._whole.words.tolist() == [0.0, 0.0, 0.0]


def _uneven(ranks: Ranks) -> tuple[float, float, list[bool]]:
    """Rank 0 weighs 6 over two micro-batches, rank 1 weighs 0.5, rank 2 has no sample; rank 1 asks in step 2."""
    with process_group(ranks, CPU):
        step, model = stepper(ranks, Line())
        data = [
            Step([batch([1.0, 2.0], [1.0, 3.0]), batch([3.0], [2.0])], False, 4, 4),
            Step([batch([4.0], [0.5])], False, 4, 4),
            Step([batch([9.0])], True, 4, 4),
        ][ranks.rank]
        (reading,) = step.step(1, data, lr=0.01, stop=False)
        moved = model.weight.item()
        stops = [step.step(number, data, 0.0, stop=(ranks.rank, number) == (1, 2))[0].stop for number in (2, 3)]
        return reading.loss, moved, stops


def test_uneven_weights_are_exact_and_one_rank_s_wish_to_stop_reaches_all(gang: Gang) -> None:
    total, weight = 1.0 + 12.0 + 18.0 + 8.0, 6.5
    answers = gang(3, _uneven)
    assert answers == [answers[0]] * 3
    loss, moved, stops = answers[0]
    assert loss == pytest.approx(total / weight)
    assert moved == pytest.approx(1 - 0.01 * 2 * total / weight, rel=1e-6)
    assert stops == [True, False]


def _bad_value(ranks: Ranks) -> tuple[str, bool]:
    with process_group(ranks, CPU):
        step, model = stepper(ranks, Line())
        good, bad = Step([batch([1.0])], False, 2, 2), Step([batch([float("inf")])], False, 2, 2)
        step.step(1, good, lr=0.1, stop=False)
        before = model.weight.item()
        try:
            step.step(2, bad if ranks.rank == 1 else good, lr=0.1, stop=False)
        except NotFinite as error:
            return str(error), before == model.weight.item()
        return "", False


def test_a_loss_that_is_no_number_ends_every_rank_before_it_does_harm(gang: Gang) -> None:
    first, second = gang(2, _bad_value)
    assert first == second
    assert first[0].startswith("step 2: the loss on rank 1 is inf; no checkpoint was written")
    assert first[1]


def _left_out(ranks: Ranks) -> tuple[str, list[float]]:
    with process_group(ranks, CPU):
        data = Step([batch([2.0 + ranks.rank])], False, 2, 2)
        step, model = stepper(ranks, Line(extra=True, find_unused_parameters=True))
        losses = [step.step(number, data, lr=0.01, stop=False)[0].loss for number in (1, 2)]
        assert model.left_out.tolist() == [0.0, 0.0]
        try:
            stepper(ranks, Line(extra=True))[0].step(1, data, lr=0.01, stop=False)
        except TrainingError as error:
            return str(error), losses
        return "", losses


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_a_parameter_without_a_gradient_is_named_or_allowed(gang: Gang) -> None:
    for answers in (gang(2, _left_out), [_left_out(Ranks())]):
        for message, losses in answers:
            assert message.startswith("the first step gave no gradient to left_out; freeze them")
            mean = 6.5 if len(answers) == 2 else 4.0
            assert losses[0] == pytest.approx(mean)
            assert losses[1] < losses[0]


class Vector(Line):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return model(batch[0])[:, 0], batch[1].sum()


def test_faults_of_a_loss_are_explained() -> None:
    with pytest.raises(TrainingError, match=r"the task's loss has shape \(2,\); return the sum, a scalar"):
        stepper(Ranks(), Vector())[0].step(1, Step([batch([1.0, 2.0])], False, 2, 2), 0.1, stop=False)
    with pytest.raises(TrainingError, match=r"step 1: the loss's weight is 0.0 over all ranks"):
        stepper(Ranks(), Line())[0].step(1, Step([batch([1.0], [0.0])], False, 1, 1), 0.1, stop=False)


def test_bf16_keeps_the_parameters_in_fp32() -> None:
    step, model = stepper(Ranks(), Line(), precision="bf16")
    (reading,) = step.step(1, Step([batch([1.0, 2.0])], False, 2, 2), lr=0.1, stop=False)
    assert model.weight.dtype == torch.float32
    assert reading.loss == pytest.approx(2.5, rel=1e-2)


def _late(ranks: Ranks) -> list[list[tuple[Any, ...]]]:
    """The way of a CUDA device, walked on the CPU: readings come one step late, the factor is a tensor."""
    with process_group(ranks, CPU):
        step, _ = stepper(ranks, Line(), clip_norm=5.0)
        step._late = Late(step._whole.words)
        data = Step([batch([1.0 + ranks.rank])], False, 2, 2)
        seen = [step.step(n, data, 0.01, stop=(ranks.rank, n) == (1, 2), now=n == 4) for n in (1, 2, 3, 4)]
        seen.append(step.flush())
        bad = Step([batch([float("nan") if ranks.rank == 1 else 1.0])], False, 2, 2)
        assert step.step(5, bad, 0.0, stop=False) == []
        with pytest.raises(NotFinite, match="step 5: the loss on rank 1 is nan"):
            step.step(6, data, 0.0, stop=False)
        return [[tuple(reading) for reading in readings] for readings in seen]


def test_late_readings_are_those_of_the_step_before_on_all_ranks(gang: Gang) -> None:
    first, second = gang(2, _late)
    assert first == second
    assert [[reading[0] for reading in readings] for readings in first] == [[], [1], [2], [3, 4], []]
    flat = [reading for readings in first for reading in readings]
    assert [stop for *_, stop in flat] == [False, True, False, False]
    weight, wanted = 1.0, []
    for _ in range(4):
        wanted.append(2.5 * weight**2)
        weight -= 0.01 * min(5.0, 5.0 * weight)
    assert [loss for _, _, loss, _, _ in flat] == pytest.approx(wanted, rel=1e-5)
