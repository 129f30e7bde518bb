"""Proves that batches are what the indices say, in the rank or in workers, whatever kind of dataset it is.

pytest tests/training/test_loader.py
"""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from training.config import DataConfig
from training.keyed import keyed_reader
from training.loader import Loader, place
from training.order import Order, Slots
from training.schedule import BatchPlan

CPU = torch.device("cpu")


class Fetching:
    def __len__(self) -> int:
        return 11

    def fetch(self, indices: npt.NDArray[np.int64]) -> tuple[torch.Tensor, list[int]]:
        return torch.from_numpy(indices) * 10.0, indices.tolist()


class Items:
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(index * 10.0), index


class Noisy(Items):
    def __init__(self, draws: str) -> None:
        self.draws = draws

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand((), dtype=torch.float64)
        return noise if self.draws == "torch" else noise + random.random() + float(np.random.rand()), index


def slots(rank: int = 0, world_size: int = 2) -> Slots:
    return Slots(Order(11, 5), BatchPlan(2, 1, world_size), rank)


def steps(dataset: Any, workers: int, samples: int = 0, count: int = 7) -> list[Any]:
    return list(Loader(dataset, DataConfig(workers=workers), CPU).steps(slots(), samples, count))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Fetching(), Items()], ids=["fetch", "getitem"])
def test_batches_are_the_ranks_shares(dataset: Any, workers: int) -> None:
    wanted = slots().shares(0)
    for step in steps(dataset, workers):
        share = next(wanted)
        assert step.share[1:] == share[1:]
        assert (step.idle, step.global_size, step.samples) == share[1:4]
        for (values, indices), asked in zip(step.batches, share.micro_batches, strict=True):
            assert list(map(int, indices)) == asked.tolist()
            assert values.tolist() == [10.0 * i for i in asked]


def test_seeking_gives_what_would_have_come() -> None:
    whole = steps(Fetching(), 0)
    later = steps(Fetching(), 0, samples=whole[3].samples, count=3)
    assert [s.batches[0][1] for s in later] == [s.batches[0][1] for s in whole[4:]]


@pytest.mark.parametrize("draws", ["torch", "all"])
def test_random_samples_depend_neither_on_workers_nor_on_ranks(draws: str) -> None:
    """Noise by (epoch, sample), over two epochs and a bit; the rank's own generators stay as they are."""
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate()
    found = []
    for workers, world_size in ((0, 1), (0, 2), (1, 2), (2, 2), (3, 1)):
        noise: dict[tuple[int, int], float] = {}
        for rank in range(world_size):
            loader = Loader(Noisy(draws), DataConfig(workers=workers), CPU)
            cut = Slots(Order(11, 5), BatchPlan(4 // world_size, 1, world_size), rank)
            for step in loader.steps(cut, 0, 8):
                for values, indices in step.batches:
                    epoch = (step.samples - 1) // 11
                    noise.update(zip(((epoch, i) for i in indices.tolist()), values.tolist(), strict=True))
        found.append(noise)
    assert all(noise == found[0] for noise in found)
    assert len(found[0]) == len(set(found[0].values())) == 22 + 8
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_workers_serve_one_run_of_steps_after_another() -> None:
    loader = Loader(Fetching(), DataConfig(workers=2), CPU)
    first = next(loader.steps(slots(), 0, 7))
    again = list(loader.steps(slots(), 0, 7))
    assert again[0].batches[0][1] == first.batches[0][1] and len(again) == 7


def test_a_dataset_that_cannot_be_read_is_named() -> None:
    with pytest.raises(TypeError, match=r"int has neither fetch\(indices\) nor __getitem__\(index\)"):
        keyed_reader(3, 0)


def test_floating_tensors_take_the_precision_in_any_structure() -> None:
    pair = collections.namedtuple("pair", ["x", "y"])
    batch = {"a": [torch.ones(2)], "b": pair(torch.ones(2, dtype=torch.int64), "text")}
    moved = place(batch, CPU, torch.float64)
    assert moved["a"][0].dtype == torch.float64
    assert (moved["b"].x.dtype, moved["b"].y) == (torch.int64, "text")
