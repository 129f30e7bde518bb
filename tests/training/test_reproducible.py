"""Proves the promise of `reproducible`: the same bits on 1, 2, 3, 4 and 6 ranks, in each step and in the end.

What is compared is the bytes of the model's parameters and buffers and of the optimizer's tensors, and each step's loss
as the float it is. Dropout, batch norm, random numbers of Python and numpy, clipping, bf16, last batches smaller than
the number of ranks, accumulation, and a run that goes on with other ranks in mid-epoch. Without the mode, the same
training has other last bits on other ranks: so the comparison can fail.

    pytest tests/training/test_reproducible.py
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from training.config import BatchConfig, HealthConfig, OptimConfig, TrainConfig
from training.device import data_type
from training.loader import Loader
from training.optim import build
from training.order import Order, Slots
from training.ranks import Ranks
from training.run import process_group
from training.schedule import batch_plan
from training.step import Stepper
from training.tasks.digits import Digits
from training.tasks.text import Text
from training.words import Late

Gang = Callable[..., list[Any]]
CPU = torch.device("cpu")
STEPS = 10
PER_RANK, GLOBAL = 2, 24
"""12 micro-batches: 1 x 12, 2 x 6, 3 x 4, 4 x 3 and 6 x 2."""
WORLD_SIZES = (2, 3, 4, 6)


class Part:
    """The first `size` samples of a dataset."""

    def __init__(self, dataset: Any, size: int) -> None:
        self._dataset, self._size = dataset, size

    def __len__(self) -> int:
        return self._size

    def fetch(self, indices: npt.NDArray[np.int64]) -> Any:
        return self._dataset.fetch(indices)


class Restless(Digits):
    """Batch norm, dropout, a running mean that is put in place anew, and random numbers from everywhere."""

    def model(self) -> nn.Module:
        return Net()


class Net(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
        )
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        noise = random.gauss(0.0, 0.1) + np.random.standard_normal() * 0.1
        logits: Tensor = self.layers(x + noise * self.seen)
        return logits


class Parted(Digits):
    """Its odd digits leave out a parameter, and a third one is never used."""

    find_unused_parameters = True

    def model(self) -> nn.Module:
        model = super().model()
        for name in ("even", "never"):
            model.register_parameter(name, nn.Parameter(torch.ones(10)))
        return model

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        pixels, digits = batch
        logits = model(pixels)
        if bool((digits % 2 == 0).all()):
            logits = logits * model.even
        return F.cross_entropy(logits, digits, reduction="sum"), len(digits)


class Spoilt(Digits):
    """One image has a loss that is no number."""

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
        loss, count = super().loss(model, batch)
        return loss * (float("nan") if bool((batch[0] == SPOILT).all(1).any()) else 1.0), count


@cache
def task_of(name: str) -> Any:
    """Made before the ranks are forked, so once for all of them."""
    makers: dict[str, Callable[[], Any]] = {
        "digits": lambda: Digits(hidden=32),
        "dropout": lambda: Digits(hidden=32, dropout=0.3),
        "restless": Restless,
        "parted": lambda: Parted(hidden=16),
        "spoilt": lambda: Spoilt(hidden=16),
        "text": lambda: Text(context=16, width=16, depth=1, heads=2, max_bytes=4000, held_out_bytes=100),
    }
    return makers[name]()


SPOILT = task_of("digits").train_data().pixels[17]


@dataclass(frozen=True)
class Case:
    task: str
    size: int
    """Samples: two batches of 24 and a last one."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(clip_norm=1.0))
    precision: str = "fp32"
    health: HealthConfig = field(default_factory=HealthConfig)
    late: bool = False
    """Readings come a step late, as on a CUDA device."""
    reproducible: bool = True

    def config(self) -> TrainConfig:
        return TrainConfig(
            steps=STEPS,
            precision=self.precision,  # type: ignore[arg-type]
            reproducible=self.reproducible,
            batch=BatchConfig(per_rank=PER_RANK, global_size=GLOBAL),
            optim=self.optim,
            health=self.health,
        )


MOMENTUM = OptimConfig(name="sgd", base_lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
CASES = {
    "digits": Case("digits", 61),
    "dropout": Case("dropout", 53),
    "batch norm": Case("restless", 62, MOMENTUM),
    "batch norm, tail of four": Case("restless", 52, replace(MOMENTUM, clip_norm=0.5)),
    "fewer samples than ranks": Case("dropout", 5),
    "text": Case("text", 61),
    "text in bf16": Case("text", 53, precision="bf16"),
    "fp64": Case("dropout", 49, precision="fp64"),
    "left out": Case("parted", 61, OptimConfig(weight_decay=0.1)),
    "skipped": Case("spoilt", 60, health=HealthConfig(not_finite="skip")),
    "late": Case("dropout", 61, MOMENTUM, late=True),
}


@dataclass
class State:
    """A run's state between two attempts, and the losses of its steps so far."""

    step: int = 0
    samples: int = 0
    content: bytes = b""
    losses: list[float] = field(default_factory=list)

    def tensors(self) -> dict[str, bytes]:
        """Of the model and the optimizer, by name."""
        model, optimizer = torch.load(io.BytesIO(self.content))
        kept = {f"{p}.{k}": v for p, values in optimizer["state"].items() for k, v in values.items()}
        found = {name: v for name, v in {**model, **kept}.items() if isinstance(v, Tensor)}
        assert len(found) > len(model)
        return {name: v.reshape(-1).view(torch.uint8).numpy().tobytes() for name, v in found.items()}


def _train(ranks: Ranks, cases: dict[str, Case], begun: dict[str, State], steps: int) -> dict[str, State]:
    torch.set_num_threads(1)
    with process_group(ranks, CPU):
        return {name: _steps(ranks, case, begun.get(name, State()), steps) for name, case in cases.items()}


def _steps(ranks: Ranks, case: Case, state: State, steps: int) -> State:
    config, task = case.config(), task_of(case.task)
    torch.manual_seed(7 + ranks.rank)  # what a rank drew before must not matter; rank 0's model is everybody's
    model = task.model().to(data_type(case.precision))
    optimizer = build(config.optim, model.parameters(), config.optim.base_lr)
    if state.content:
        kept = torch.load(io.BytesIO(state.content))
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
    stepper = Stepper(task, model, optimizer, config, ranks, CPU)
    if case.late:
        stepper._late = Late(stepper._whole.words)
    data = Part(task.train_data(), case.size)
    plan = batch_plan(config.batch, ranks.world_size)
    slots = Slots(Order(len(data), seed=3), plan, ranks.rank, filled=case.reproducible)
    loader = Loader(data, config.data, CPU, data_type(case.precision))
    step, losses = state.step, list(state.losses)
    for given in loader.steps(slots, state.samples, steps):
        step += 1
        readings = stepper.step(step, given, config.optim.base_lr, stop=False)
        losses += [reading.loss for reading in readings]
    losses += [reading.loss for reading in stepper.flush()]
    content = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), content)
    return State(step, given.samples, content.getvalue(), losses)


@pytest.fixture(scope="module")
def alone() -> dict[str, State]:
    return _train(Ranks(), CASES, {}, STEPS)


@pytest.fixture(scope="module")
def together(gang: Gang, alone: dict[str, State]) -> dict[int, list[dict[str, State]]]:
    return {world_size: gang(world_size, _train, CASES, {}, STEPS) for world_size in WORLD_SIZES}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_each_number_of_ranks_has_the_same_bits(
    name: str, world_size: int, alone: dict[str, State], together: dict[int, list[dict[str, State]]]
) -> None:
    for found in together[world_size]:
        assert list(map(repr, found[name].losses)) == list(map(repr, alone[name].losses))
        assert found[name].tensors() == alone[name].tensors()


def test_the_runs_are_such_that_bits_could_differ(alone: dict[str, State], gang: Gang) -> None:
    """Without the mode, other ranks have other last bits."""
    plain = {name: replace(CASES[name], reproducible=False) for name in ("digits", "text")}
    (one,), four = [_train(Ranks(), plain, {}, STEPS)], gang(4, _train, plain, {}, STEPS)[0]
    for name in plain:
        assert one[name].losses == pytest.approx(four[name].losses, rel=1e-3)
        assert one[name].tensors() != four[name].tensors()
        assert one[name].losses != four[name].losses


def test_the_runs_are_what_their_names_say(alone: dict[str, State]) -> None:
    assert all(len(state.losses) == STEPS for state in alone.values())
    assert alone["dropout"].losses != alone["digits"].losses
    bad = [step for step, loss in enumerate(alone["skipped"].losses, start=1) if np.isnan(loss)]
    assert [(step - 1) // 3 for step in bad] == [0, 1, 2, 3]  # three steps an epoch, and in each the image comes once
    model, _ = torch.load(io.BytesIO(alone["left out"].content))
    assert model["never"].tolist() == [1.0] * 10  # no gradient, so no weight decay either
    assert model["even"].tolist() != [1.0] * 10
    model, _ = torch.load(io.BytesIO(alone["batch norm"].content))
    assert model["layers.1.num_batches_tracked"] == STEPS


def test_a_run_goes_on_with_other_ranks_in_mid_epoch(gang: Gang, alone: dict[str, State]) -> None:
    state: dict[str, State] = {}
    for world_size, steps in ((4, 1), (3, 4), (1, 3), (2, 2)):
        state = gang(world_size, _train, CASES, state, steps)[-1]
    for name, whole in alone.items():
        assert state[name].step == STEPS
        assert state[name].samples == whole.samples
        assert list(map(repr, state[name].losses)) == list(map(repr, whole.losses))
        assert state[name].tensors() == whole.tensors()
