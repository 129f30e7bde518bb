"""Proves that a single bit that differs between ranks is seen, and that the rank, its host and the tensor are named.

pytest tests/training/test_replicas.py
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from training import replicas
from training.errors import ReplicaError
from training.ranks import Ranks
from training.replicas import Replicas, digest, minority
from training.run import process_group

Gang = Callable[..., list[Any]]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.complex64]


@given(st.integers(1, 40), st.data(), st.sampled_from(TYPES), st.integers(0, 3))
def test_a_flipped_bit_and_a_swap_change_the_digest(n: int, data: st.DataObject, dtype: torch.dtype, at: int) -> None:
    raw = torch.randint(0, 256, ((n + at) * 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    tensor = raw.view(dtype)[at : at + n]
    before = int(digest(tensor))
    assert before == int(digest(tensor.clone()))
    bits = tensor.clone().view(torch.uint8) if not dtype.is_complex else torch.view_as_real(tensor.clone())
    flat = bits.view(torch.uint8).reshape(-1)
    place = data.draw(st.integers(0, len(flat) - 1))
    flat[place] ^= 1 << data.draw(st.integers(0, 7))
    changed = torch.view_as_complex(bits) if dtype.is_complex else bits.view(dtype)
    assert int(digest(changed)) != before


def test_blocks_do_not_change_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_BLOCK", 4)
    values = torch.arange(24.0).reshape(4, 6)
    swapped = values.flip(0)
    assert int(digest(values)) != int(digest(swapped))
    assert int(digest(values.t())) == int(digest(values.t().clone()))
    assert int(digest(torch.zeros(0))) == 0


def test_most_decide_and_without_most_all_are_named() -> None:
    assert minority([5, 5, 7, 5]) == [2]
    assert minority([1, 2]) == [0, 1]
    assert minority([1, 1, 2, 2]) == [0, 1, 2, 3]
    assert minority([3, 3, 3]) == []


def _compare(ranks: Ranks, wrong: list[int]) -> str:
    with process_group(ranks, torch.device("cpu")):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        compared = Replicas(model, ranks)
        compared.check(1)
        if ranks.rank in wrong:
            bits = model[1].bias.data.view(torch.int32)
            bits ^= 1 << ranks.rank
        try:
            compared.check(7)
        except ReplicaError as error:
            return str(error)
        return ""


def test_a_rank_that_differs_is_named_on_all(gang: Gang) -> None:
    first, second = (f"rank {rank} (host {socket.gethostname()})" for rank in (0, 1))
    answers = gang(3, _compare, [1])
    assert answers == [answers[0]] * 3
    said = f"step 7: the parameters of {second} differ from those of the other 2 ranks, in 1.bias; no checkpoint"
    assert answers[0].startswith(said)
    both = f"step 7: the parameters of {first}, {second} differ from each other, and no majority agrees"
    assert gang(2, _compare, [0])[0].startswith(both)
    assert gang(2, _compare, []) == ["", ""]
