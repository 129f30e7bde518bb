"""Proves that evaluation counts every sample once at every world size, and stops when it is asked to.

pytest tests/training/test_evaluate.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from training.config import DataConfig
from training.evaluate import evaluate
from training.loader import Loader
from training.ranks import Ranks
from training.run import process_group
from training.stop import StopFlag

CPU = torch.device("cpu")
Gang = Callable[..., list[Any]]


class Numbers:
    """Sample i is the number i + 1; whoever fetches leaves a trace."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self._n

    def fetch(self, indices: npt.NDArray[np.int64]) -> Tensor:
        self.fetched += indices.tolist()
        return torch.from_numpy(indices) + 1.0


class Adding:
    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
        assert not model.training and not torch.is_grad_enabled()
        return batch.sum(), len(batch)


class Measuring(Adding):
    def eval_metrics(self, model: nn.Module, batch: Tensor) -> dict[str, tuple[Tensor | float, float]]:
        return {"mean": self.loss(model, batch), "odd": (float((batch % 2).sum()), len(batch))}


def run(ranks: Ranks, n: int, task: Any, stop: StopFlag) -> dict[str, float] | None:
    model = nn.Dropout()
    found = evaluate(task, model, Loader(Numbers(n), DataConfig(), CPU), 2, "fp32", ranks, stop)
    assert model.training
    return found


@pytest.mark.parametrize("n", [1, 7, 8])
def test_alone(n: int) -> None:
    wanted = {"mean": (n + 1) / 2, "odd": (n + 1) // 2 / n}
    assert run(Ranks(), n, Measuring(), StopFlag()) == pytest.approx(wanted)
    assert run(Ranks(), n, Adding(), StopFlag()) == {"loss": (n + 1) / 2}


def _all_sizes(ranks: Ranks) -> list[dict[str, float] | None]:
    with process_group(ranks, CPU):
        return [run(ranks, n, Measuring(), StopFlag()) for n in (1, 2, 7, 12, 13)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_means_at_every_world_size(gang: Gang, world_size: int) -> None:
    alone = [run(Ranks(), n, Measuring(), StopFlag()) for n in (1, 2, 7, 12, 13)]
    assert gang(world_size, _all_sizes) == [alone] * world_size


def _stopped(ranks: Ranks) -> tuple[dict[str, float] | None, int]:
    with process_group(ranks, CPU):
        stop = StopFlag()
        data = Numbers(40)
        if ranks.rank == 1:
            stop.ask("a test")
        return evaluate(Adding(), nn.Dropout(), Loader(data, DataConfig(), CPU), 2, "fp32", ranks, stop), len(
            data.fetched
        )


def test_a_stop_ends_it_on_all_ranks_after_a_batch(gang: Gang) -> None:
    assert gang(2, _stopped) == [(None, 4), (None, 4)]


def _buffers(ranks: Ranks) -> float:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.tensor(float(ranks.rank)))

    class Task:
        def loss(self, model: nn.Module, batch: Tensor) -> tuple[Any, float]:
            return model.mean * len(batch), len(batch)

    with process_group(ranks, CPU):
        found = evaluate(Task(), Biased(), Loader(Numbers(8), DataConfig(), CPU), 2, "fp32", ranks, StopFlag())  # type: ignore[arg-type]
        assert found is not None
        return found["loss"]


def test_one_model_is_evaluated_rank_0_s(gang: Gang) -> None:
    assert gang(2, _buffers) == [0.0, 0.0]


class Fractions(Numbers):
    """Numbers whose sum hangs on the order of addition."""

    def fetch(self, indices: npt.NDArray[np.int64]) -> Tensor:
        return 1.0 / (super().fetch(indices).double() * 3.0)


def _fractions(ranks: Ranks, reproducible: bool) -> list[str]:
    with process_group(ranks, CPU):
        means = []
        for n in (1, 2, 101, 1000):
            loader = Loader(Fractions(n), DataConfig(), CPU)
            found = evaluate(Adding(), nn.Dropout(), loader, 7, "fp32", ranks, StopFlag(), reproducible=reproducible)
            assert found is not None
            means.append(found["loss"].hex())
        return means


def test_reproducible_means_have_the_same_bits_at_each_world_size(gang: Gang) -> None:
    alone = _fractions(Ranks(), True)
    for world_size in (2, 3, 5):
        assert gang(world_size, _fractions, True) == [alone] * world_size
    assert _fractions(Ranks(), False) != gang(3, _fractions, False)[0]
