"""Proves the step's promises beside equivalence: weights of any kind, agreed ends, faults that are explained.

pytest tests/training/test_step.py
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training.config import HealthConfig, OptimConfig, TrainConfig
from training.errors import NotFinite, TrainingError
from training.loader import Step
from training.optim import build
from training.order import Share
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


def given(batches: list[Batch], idle: bool, global_size: int, samples: int) -> Step:
    """A step's data, whose indices nobody asks for."""
    return Step(batches, idle, global_size, samples, Share([], idle, global_size, samples, 0))


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
    (reading,) = step.step(1, given([batch([1.0, 2.0]), batch([3.0])], False, 3, 3), lr=0.03, stop=False)
    assert reading._replace(loss=0.0) == (1, 3, 0.0, 0.03, False, None)
    assert reading.loss == pytest.approx(14 / 3)
    assert model.weight.item() == pytest.approx(1 - 0.03 * 28 / 3)
    assert model.weight.grad is None
    assert step.flush() == []


def test_clipping_takes_the_norm_of_the_mean_gradient() -> None:
    for limit, moved in ((1.0, 1.0), (5.0, 5.0), (1000.0, 28 / 3)):
        step, model = stepper(Ranks(), Line(), clip_norm=limit)
        step.step(1, given([batch([1.0, 2.0]), batch([3.0])], False, 3, 3), lr=0.01, stop=False)
        assert 1 - model.weight.item() == pytest.approx(0.01 * moved, rel=1e-5)


def test_the_words_do_not_reach_the_optimizer_or_the_model() -> None:
    step, model = stepper(Ranks(), Line())
    assert list(model.state_dict()) == ["weight"]
    step.step(1, given([batch([1.0])], False, 1, 1), lr=0.0, stop=True)
    assert step._whole.words.tolist() == [0.0] * 4


def _uneven(ranks: Ranks) -> tuple[float, float, list[bool]]:
    """Rank 0 weighs 6 over two micro-batches, rank 1 weighs 0.5, rank 2 has no sample; rank 1 asks in step 2."""
    with process_group(ranks, CPU):
        step, model = stepper(ranks, Line())
        data = [
            given([batch([1.0, 2.0], [1.0, 3.0]), batch([3.0], [2.0])], False, 4, 4),
            given([batch([4.0], [0.5])], False, 4, 4),
            given([batch([9.0])], True, 4, 4),
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
        good, bad = given([batch([1.0])], False, 2, 2), given([batch([float("inf")])], False, 2, 2)
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
    assert first[0].startswith(
        f"step 2: the loss on rank 1 is inf (host {socket.gethostname()}); no checkpoint was written"
    )
    assert first[1]


def _left_out(ranks: Ranks) -> tuple[str, list[float]]:
    with process_group(ranks, CPU):
        data = given([batch([2.0 + ranks.rank])], False, 2, 2)
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
        stepper(Ranks(), Vector())[0].step(1, given([batch([1.0, 2.0])], False, 2, 2), 0.1, stop=False)
    with pytest.raises(TrainingError, match=r"step 1: the loss's weight is 0.0 over all ranks"):
        stepper(Ranks(), Line())[0].step(1, given([batch([1.0], [0.0])], False, 1, 1), 0.1, stop=False)


def test_bf16_keeps_the_parameters_in_fp32() -> None:
    step, model = stepper(Ranks(), Line(), precision="bf16")
    (reading,) = step.step(1, given([batch([1.0, 2.0])], False, 2, 2), lr=0.1, stop=False)
    assert model.weight.dtype == torch.float32
    assert reading.loss == pytest.approx(2.5, rel=1e-2)


def _late(ranks: Ranks) -> list[list[tuple[Any, ...]]]:
    """The way of a CUDA device, walked on the CPU: readings come one step late, the factor is a tensor."""
    with process_group(ranks, CPU):
        step, _ = stepper(ranks, Line(), clip_norm=5.0)
        step._late = Late(step._whole.words)
        data = given([batch([1.0 + ranks.rank])], False, 2, 2)
        seen = [step.step(n, data, 0.01, stop=(ranks.rank, n) == (1, 2), now=n == 4) for n in (1, 2, 3, 4)]
        seen.append(step.flush())
        bad = given([batch([float("nan") if ranks.rank == 1 else 1.0])], False, 2, 2)
        assert step.step(5, bad, 0.0, stop=False) == []
        with pytest.raises(NotFinite, match="step 5: the loss on rank 1 is nan"):
            step.step(6, data, 0.0, stop=False)
        return [[tuple(reading) for reading in readings] for readings in seen]


def test_late_readings_are_those_of_the_step_before_on_all_ranks(gang: Gang) -> None:
    first, second = gang(2, _late)
    assert first == second
    assert [[reading[0] for reading in readings] for readings in first] == [[], [1], [2], [3, 4], []]
    flat = [reading for readings in first for reading in readings]
    assert [stop for *_, stop, _ in flat] == [False, True, False, False]
    weight, wanted = 1.0, []
    for _ in range(4):
        wanted.append(2.5 * weight**2)
        weight -= 0.01 * min(5.0, 5.0 * weight)
    assert [loss for _, _, loss, *_ in flat] == pytest.approx(wanted, rel=1e-5)


class Rooted(Line):
    """Has a running sum, as a batch norm has a mean, and a loss that at x = 0 is finite while its gradient is not."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("seen", torch.zeros(1))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        x, weights = batch
        model.seen += x.sum()  # type: ignore[operator]
        return (weights * model(x)[:, 0].sqrt()).sum(), weights.sum()


def _skipper(ranks: Ranks, optim: OptimConfig, late: bool) -> tuple[Stepper, nn.Module, torch.optim.Optimizer]:
    task = Rooted()
    config = TrainConfig(optim=optim, health=HealthConfig(not_finite="skip"))
    model = task.model()
    optimizer = build(config.optim, model.parameters(), 1.0)
    step = Stepper(task, model, optimizer, config, ranks, CPU)
    if late:
        step._late = Late(step._whole.words)
    return step, model, optimizer


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    moments = [{k: v.tolist() for k, v in kept.items()} for kept in optimizer.state.values()]
    return [{k: v.tolist() for k, v in model.state_dict().items()}, moments]


SKIPPED = {
    "adamw": OptimConfig(name="adamw", weight_decay=0.1),
    "momentum": OptimConfig(name="sgd", momentum=0.9),
    "clipped": OptimConfig(name="sgd", clip_norm=1.0),
}


def _skips(ranks: Ranks) -> dict[tuple[str, bool], list[str]]:
    """Steps 1, 3 and 4 are bad on rank 1: no gradient, no loss, neither. Returns what was said of them."""
    said = {}
    with process_group(ranks, CPU):
        good = given([batch([1.0 + ranks.rank])], False, 2, 2)
        for name, optim in SKIPPED.items():
            for late in (False, True):
                step, model, optimizer = _skipper(ranks, optim, late)
                whole, twin, other = _skipper(ranks, optim, late)
                readings = []
                for number, value in enumerate((0.0, 1.0, float("nan"), float("-inf"), 2.0), start=1):
                    data = given([batch([value])], False, 2, 2) if ranks.rank == 1 else good
                    before = _state(model, optimizer)
                    readings += step.step(number, data, 0.01, stop=False)
                    if value > 0:
                        whole.step(number, data, 0.01, stop=False)
                        assert _state(model, optimizer) == _state(twin, other)
                        assert before != _state(model, optimizer)
                    else:
                        assert before == _state(model, optimizer)
                readings += step.flush()
                assert [reading.step for reading in readings] == [1, 2, 3, 4, 5]
                said[name, late] = [reading.fault.found if reading.fault else "" for reading in readings]
    return said


def test_a_bad_step_is_skipped_on_all_ranks_and_leaves_every_bit_as_it_was(gang: Gang) -> None:
    first, second = gang(2, _skips)
    assert first == second
    here = f"(host {socket.gethostname()})"
    for (_, late), said in first.items():
        assert said[0] == ("the gradient is nan" if late else "the gradient of weight is nan")
        assert said[1] == said[4] == ""
        assert said[2] == said[3] == f"the loss on rank 1 is nan {here}"


def test_double_precision_on_a_device_is_checked_too() -> None:
    step, model = stepper(Ranks(), Rooted(), precision="fp64")
    model.double()
    config = TrainConfig(precision="fp64", optim=OptimConfig(name="sgd"), health=HealthConfig(not_finite="skip"))
    step = Stepper(Rooted(), model, build(config.optim, model.parameters(), 1.0), config, Ranks(), CPU)
    step._late = Late(step._whole.words)
    data = [given([(torch.tensor([[x]]).double(), torch.ones(1).double())], False, 1, 1) for x in (1.0, 0.0, 1.0)]
    readings = [r for n, d in enumerate(data, start=1) for r in step.step(n, d, 0.1, stop=False, now=True)]
    assert [reading.fault is not None for reading in readings] == [False, True, False]
    assert model.weight.item() == pytest.approx(1 - 0.05 - 0.05 / 0.95**0.5, rel=1e-12)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_bad_gradient_ends_the_run_before_anything_can_be_saved(clip_norm: float | None) -> None:
    bad, good = given([batch([0.0])], False, 1, 1), given([batch([1.0])], False, 1, 1)
    step, model = stepper(Ranks(), Rooted(), clip_norm=clip_norm)
    with pytest.raises(NotFinite, match="step 1: the gradient of weight is nan; no checkpoint was written"):
        step.step(1, bad, 0.1, stop=False, now=True)
    assert model.weight.item() == 1.0
    if clip_norm is None:
        assert step.step(1, bad, 0.1, stop=False)[0].fault is None
        with pytest.raises(NotFinite, match="step 2: the loss, with weight spoiled by an earlier gradient, on rank"):
            step.step(2, good, 0.1, stop=False)
