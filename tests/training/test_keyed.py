"""Proves that what a sample draws at random depends on seed, epoch and sample alone, and costs others no random state.

pytest tests/training/test_keyed.py
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from training.errors import DataError
from training.generators import default_generators
from training.keyed import Keys, keyed_reader, sample_keys
from training.permute import Indices

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "torch normal": lambda: torch.randn(()).item(),
    "random": random.random,
    "random gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    "numpy normal": lambda: float(np.random.randn()),
    "all": lambda: torch.rand(()).item() + random.random() + float(np.random.rand()),
}


class Drawing:
    def __init__(self, draw: Callable[[], float], rarely: bool = False) -> None:
        self.draw, self.rarely = draw, rarely

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, 0.0 if self.rarely and index % 7 else self.draw()


def read_all(dataset: Any, sizes: list[int], seed: int = 0, epoch: int = 0) -> dict[int, float]:
    """Samples 0, 1, ... in batches of these sizes."""
    read, start, found = keyed_reader(dataset, seed), 0, {}
    for size in sizes:
        for index, value in zip(*read(epoch, np.arange(start, start + size)), strict=True):
            found[int(index)] = float(value)
        start += size
    return found


def own_draws() -> list[float]:
    return [draw() for draw in DRAWS.values()]


@pytest.mark.parametrize("rarely", [False, True])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_sample_draws_the_same_in_every_batch(draw: str, rarely: bool) -> None:
    dataset = Drawing(DRAWS[draw], rarely)
    found = read_all(dataset, [30])
    own_draws()  # whatever the process drew meanwhile does not matter
    assert found == read_all(dataset, [1, 7, 2, 20]) == read_all(dataset, [15, 15])
    drawn = [value for index, value in found.items() if not (rarely and index % 7)]
    assert len(set(drawn)) == len(drawn) == (5 if rarely else 30)


def test_seeds_and_epochs_draw_differently() -> None:
    dataset = Drawing(DRAWS["torch"])
    runs = [read_all(dataset, [30], seed, epoch) for seed, epoch in ((0, 0), (1, 0), (0, 1))]
    assert len({value for run in runs for value in run.values()}) == 90


@pytest.mark.parametrize("draw", [*DRAWS, None])
@pytest.mark.parametrize("before", [0, 1], ids=["even", "odd"])
def test_the_generators_are_left_as_they_were(draw: str | None, before: int) -> None:
    """Also when the second of a pair of normal numbers was still to be given out."""
    dataset = Drawing(DRAWS[draw] if draw else lambda: 0.0)
    found = []
    for reads in (False, True):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        values = []
        for _ in range(3):
            for _ in range(before):
                values += [random.gauss(0, 1), float(np.random.randn())]
            if reads:
                read_all(dataset, [4, 4])
            values += own_draws()
        found.append(values)
    assert found[0] == found[1]


def test_they_are_left_so_when_a_sample_fails_and_it_is_named() -> None:
    def fail() -> float:
        torch.rand(())
        raise ValueError("bad bytes")

    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="bad bytes") as failed:
        read_all(Drawing(fail), [4])
    assert failed.value.__notes__ == ["while sample 0 was made"]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dataset_that_draws_nothing_is_never_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[str] = []
    for generator in default_generators():
        monkeypatch.setattr(type(generator), "seed", lambda self, key: seeded.append(self.name))
    read_all(Drawing(lambda: 0.0), [10, 10])
    assert seeded == []
    read_all(Drawing(lambda: random.random() * 0), [10, 10])
    assert seeded == ["random"] * 20


def test_another_layout_of_pythons_generator_is_read_the_slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = next(g for g in default_generators() if g.name == "random")
    monkeypatch.setattr(generator, "_readable", False)
    state = random.getstate()
    generator.put_aside()
    assert not generator.moved()
    random.random()
    assert generator.moved()
    generator.put_back()
    assert random.getstate() == state


def test_a_bit_generator_of_another_kind_is_put_back() -> None:
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(other := np.random.PCG64(1))
        read_all(Drawing(DRAWS["numpy"]), [3])
        assert np.random.get_bit_generator() is other
        assert float(np.random.rand()) == float(np.random.RandomState(np.random.PCG64(1)).rand())
    finally:
        np.random.set_bit_generator(own)


class Fetching:
    """Adds to each sample noise of its own."""

    def fetch(self, indices: Indices, keys: Keys) -> list[float]:
        assert keys.dtype == np.uint64 and keys.shape == indices.shape
        return [float(np.random.Generator(np.random.Philox(key=int(key))).random()) for key in keys]


def test_fetch_gets_a_key_of_each_sample() -> None:
    read = keyed_reader(Fetching(), 3)
    whole = read(2, np.arange(10))
    assert len(set(whole)) == 10
    assert whole[4:7] == read(2, np.arange(4, 7))
    assert whole != read(1, np.arange(10))


class Careless:
    def fetch(self, indices: Indices) -> torch.Tensor:
        return torch.from_numpy(indices) + torch.rand(())


def test_a_fetch_that_draws_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        DataError, match=r"Careless\.fetch drew random numbers from torch: .*fetch\(self, indices, keys"
    ):
        keyed_reader(Careless(), 0)(0, np.arange(4))


def test_keys_never_change() -> None:
    """These values are a promise to every run that resumes after an upgrade."""
    assert sample_keys(0, 0, np.array([0, 1])).tolist() == [14493843000994821247, 14275034120790925828]
    assert len(set(sample_keys(7, 3, np.arange(100_000)).tolist())) == 100_000


def test_a_dataset_that_cannot_be_read_is_named() -> None:
    with pytest.raises(TypeError, match=r"int has neither fetch\(indices\) nor __getitem__\(index\)"):
        keyed_reader(3, 0)
