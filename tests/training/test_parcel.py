"""Proves that a batch comes out of shared memory as it went in, in memory of its own.

pytest tests/training/test_parcel.py
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from training.parcel import Slot, pack, unpack

Pair = collections.namedtuple("Pair", ["x", "y"])


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot()
    yield made
    made.close()


def through(slot: Slot, batch: Any) -> Any:
    return unpack(pack([batch], slot), slot, "copy", lambda: None)[0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12, dtype=torch.float32).reshape(3, 4).T,
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 5, dtype=torch.int64),
        torch.randn(5).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3]).conj(),
        torch.ones(3, requires_grad=True),
        torch.ones(4).expand(3, 4),
        torch.eye(3).to_sparse(),
    ],
    ids=["transposed", "scalar", "empty", "bfloat16", "bool", "conjugate", "parameter", "expanded", "sparse"],
)
def test_tensors_of_every_kind(slot: Slot, tensor: torch.Tensor) -> None:
    found = through(slot, tensor)
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(found.to_dense(), tensor.detach().to_dense())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4)[:, ::2],
        np.array(7, dtype=np.uint8),
        np.array(["a", "bcd"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array([{"a": 1}], dtype=object),
        np.empty((0, 3)),
    ],
    ids=["strided", "scalar", "text", "record", "date", "object", "empty"],
)
def test_arrays_of_every_kind(slot: Slot, array: Any) -> None:
    found = through(slot, array)
    assert (found.dtype, found.shape, type(found)) == (array.dtype, array.shape, np.ndarray)
    assert np.array_equal(found, array)


def test_any_structure(slot: Slot) -> None:
    batch = {"a": [torch.ones(2), "text", None], "b": Pair(np.arange(3), (1.5, b"raw")), 3: set()}
    found = through(slot, batch)
    assert found["a"][1:] == ["text", None] and found["b"].y == (1.5, b"raw") and found[3] == set()
    assert torch.equal(found["a"][0], torch.ones(2)) and found["b"].x.tolist() == [0, 1, 2]
    assert isinstance(found["b"], Pair)


def test_it_is_a_copy_that_may_be_written(slot: Slot) -> None:
    first = through(slot, (torch.ones(1000), np.ones(1000)))
    second = through(slot, (torch.zeros(1000), np.zeros(1000)))
    first[0][0], first[1][0] = 5, 5
    assert first[0].sum() == 1004 and first[1].sum() == 1004
    assert second[0].sum() == 0 and second[1].sum() == 0


def test_a_slot_grows_and_keeps_what_it_held(slot: Slot) -> None:
    slot.view(3)[:] = [1, 2, 3]
    assert len(slot.view(1_000_000)) == 1_000_000
    assert slot.view(3).tolist() == [1, 2, 3]
