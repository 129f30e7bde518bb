"""Proves the promise that N ranks compute what one process with the whole batch would compute.

Parameters after 20 steps on 1, 2, 3 and 4 ranks, with accumulation 1 and 2, on data that the batch does not divide (a
last batch smaller than the number of ranks included), against a plain loop written out below, which uses nothing of
our step. Relative means, for each parameter tensor: max |ours - plain| / max |plain|; the worst tensor counts.

    pytest tests/training/test_equivalence.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from training.config import BatchConfig, OptimConfig, TrainConfig
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

STEPS = 20
GLOBAL = 24
"""Divided by every world size here, times 2."""
CPU = torch.device("cpu")
Parameters = dict[str, npt.NDArray[Any]]


class Part:
    """The first `size` samples of a dataset."""

    def __init__(self, dataset: Any, size: int) -> None:
        self._dataset, self._size = dataset, size

    def __len__(self) -> int:
        return self._size

    def fetch(self, indices: npt.NDArray[np.int64]) -> Any:
        assert indices.max() < self._size
        return self._dataset.fetch(indices)


@cache
def task_of(name: str) -> Any:
    """Made before the ranks are forked, so once for all of them."""
    if name == "digits":
        return Digits(hidden=64)
    return Text(context=32, width=32, depth=1, heads=2, max_bytes=16000, held_out_bytes=100)


SIZES = {"tail of 13": 5 * GLOBAL + 13, "tail of 1": 4 * GLOBAL + 1}
TOLERANCE = {"fp32": 1e-6, "fp64": 1e-12}
OPTIMIZERS = {
    "sgd": OptimConfig(name="sgd", base_lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01, clip_norm=1.0),
    # Adam divides a gradient by its own size. Where that is rounding noise, whose size depends on the order of a sum,
    # the default eps of 1e-8 turns it into a step of full length: a plain loop then differs from itself by 5e-6 when
    # the rows of each batch are merely reversed. This eps is above the noise.
    "adamw": OptimConfig(name="adamw", base_lr=1.0e-3, eps=1.0e-4, weight_decay=0.01, clip_norm=1.0),
}
CASES = [
    (task, optimizer, precision, size)
    for task in ("digits", "text")
    for optimizer in OPTIMIZERS
    for precision in TOLERANCE
    for size in SIZES
]


def settings(optimizer: str, precision: str, accumulate: int) -> TrainConfig:
    return TrainConfig(
        steps=STEPS,
        precision=precision,  # type: ignore[arg-type]
        batch=BatchConfig(global_size=GLOBAL, accumulate=accumulate),
        optim=OPTIMIZERS[optimizer],
    )


def fresh(task: Any, precision: str) -> torch.nn.Module:
    torch.manual_seed(7)
    model: torch.nn.Module = task.model().to(data_type(precision))
    return model


def copied(model: torch.nn.Module) -> Parameters:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def plain(task_name: str, optimizer_name: str, precision: str, size_name: str) -> Parameters:
    """The whole batch in one process: torch's own optimizer, mean loss and clipping, as a textbook has it."""
    task = task_of(task_name)
    model = fresh(task, precision)
    data = Part(task.train_data(), SIZES[size_name])
    order = Order(len(data), seed=3)
    optimizer: torch.optim.Optimizer
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0e-3, eps=1.0e-4, weight_decay=0.01)
    epoch, position = 0, 0
    for _ in range(STEPS):
        inputs, targets = data.fetch(order.indices(epoch, position, min(position + GLOBAL, len(data))))
        if precision == "fp64" and inputs.is_floating_point():
            inputs = inputs.double()
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        position += GLOBAL
        if position >= len(data):
            epoch, position = epoch + 1, 0
    return copied(model)


def on_ranks(ranks: Ranks) -> dict[tuple[str, str, str, str, int], Parameters]:
    """Every case with both accumulations, on one process group."""
    torch.set_num_threads(1)
    with process_group(ranks, CPU):
        return {(*case, accumulate): ours(ranks, *case, accumulate) for case in CASES for accumulate in (1, 2)}


def ours(
    ranks: Ranks, task_name: str, optimizer_name: str, precision: str, size_name: str, accumulate: int
) -> Parameters:
    config = settings(optimizer_name, precision, accumulate)
    task = task_of(task_name)
    model = fresh(task, precision)
    data = Part(task.train_data(), SIZES[size_name])
    optimizer = build(config.optim, model.parameters(), config.optim.base_lr)
    stepper = Stepper(task, model, optimizer, config, ranks, CPU)
    slots = Slots(Order(len(data), seed=3), batch_plan(config.batch, ranks.world_size), ranks.rank)
    loader = Loader(data, config.data, CPU, data_type(precision))
    for number, step in enumerate(loader.steps(slots, 0, STEPS), start=1):
        stepper.step(number, step, config.optim.base_lr, stop=False)
    return copied(model)


def relative(found: Parameters, wanted: Parameters) -> float:
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[name] - value).max() / np.abs(value).max()) for name, value in wanted.items())


@pytest.fixture(scope="module")
def results(gang: Callable[..., list[Any]]) -> dict[int, list[Any]]:
    for name in ("digits", "text"):
        task_of(name)
    return {world_size: gang(world_size, on_ranks) for world_size in (1, 2, 3, 4)}


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str, str, str], Parameters]:
    return {case: plain(*case) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_compute_what_one_process_computes(
    results: dict[int, list[Any]],
    references: dict[tuple[str, str, str, str], Parameters],
    world_size: int,
    accumulate: int,
    case: tuple[str, str, str, str],
) -> None:
    off = relative(results[world_size][0][(*case, accumulate)], references[case])
    assert off <= TOLERANCE[case[2]]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_hold_the_same_bits(results: dict[int, list[Any]], world_size: int) -> None:
    first, *others = results[world_size]
    for other in others:
        for key, parameters in first.items():
            for name, value in parameters.items():
                np.testing.assert_array_equal(value, other[key][name])


def test_the_measure_sees_a_wrong_step(references: dict[tuple[str, str, str, str], Parameters]) -> None:
    wanted = references["digits", "sgd", "fp64", "tail of 13"]
    name = next(iter(wanted))
    assert relative({**wanted, name: wanted[name] * (1 + 1e-9)}, wanted) == pytest.approx(1e-9)
