"""Proves that ranks come to the same bits, whatever their number, types and memory layouts of what they add.

pytest tests/training/test_sums.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from training.ranks import Ranks
from training.run import process_group
from training.sums import Flat, Sums
from training.tree import plan

Gang = Callable[..., list[Any]]
CPU = torch.device("cpu")
LEAVES = 12


def forms() -> list[Tensor]:
    """A matrix, an image kernel that lies channel by channel, a scalar, and numbers of other types."""
    return [
        torch.zeros(5, 3),
        torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.zeros(()),
        torch.zeros(7, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(4, dtype=torch.float64),
    ]


def leaf(number: int) -> list[Tensor]:
    """Numbers of very different size, so that each order of addition has a sum of its own."""
    generator = torch.Generator().manual_seed(number)
    drawn = []
    for form in forms():
        size = 10.0 ** torch.randint(-6, 7, form.shape, generator=generator)
        drawn.append((torch.randn(form.shape, generator=generator) * size).to(form.dtype))
    return drawn


def raw(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def _added(ranks: Ranks, counts: list[int]) -> list[list[bytes]]:
    with process_group(ranks, CPU):
        found, sums = [], Sums(forms(), ranks)
        for count in counts:
            todo = plan(count, LEAVES // ranks.world_size, ranks.world_size, ranks.rank)
            sums.begin()
            for number, due in zip(todo.leaves, todo.adding, strict=True):
                sums.add(leaf(number), due)
            found.append(raw(sums.total(todo).views))
        return found


def test_each_number_of_ranks_comes_to_the_same_bits(gang: Gang) -> None:
    """Whole batches, and last ones that leave ranks without a leaf."""
    counts = [12, 11, 7, 2, 1, 12]
    alone = _added(Ranks(), counts)
    assert alone[0] == alone[-1] != alone[2]
    for world_size in (2, 3, 4, 6):
        assert gang(world_size, _added, counts) == [alone] * world_size


def test_the_order_is_the_tree_s_and_another_one_has_other_bits() -> None:
    a, b, c, d = (leaf(number) for number in range(4))
    sums, todo = Sums(forms(), Ranks()), plan(4, 4, 1, 0)
    sums.begin()
    for number, due in zip(todo.leaves, todo.adding, strict=True):
        sums.add(leaf(number), due)
    found = raw(sums.total(todo).views)
    assert found == raw([(w + x) + (y + z) for w, x, y, z in zip(a, b, c, d, strict=True)])
    assert found != raw([((w + x) + y) + z for w, x, y, z in zip(a, b, c, d, strict=True)])


@pytest.mark.parametrize("leaves", [1, 7, 16, 64])
def test_memory_grows_with_the_height_of_the_tree_not_with_its_leaves(
    leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    init = Flat.__init__

    def counted(self: Flat, *arguments: Any) -> None:
        made.append(1)
        init(self, *arguments)

    monkeypatch.setattr(Flat, "__init__", counted)
    sums, todo = Sums([torch.zeros(2)], Ranks()), plan(leaves, leaves, 1, 0)
    for _ in range(3):
        sums.begin()
        for due in todo.adding:
            sums.add([torch.ones(2)], due)
        assert sums.total(todo).views[0].tolist() == [leaves, leaves]
    assert len(made) <= leaves.bit_length()


def test_views_have_the_layout_of_what_they_stand_for() -> None:
    flat = Flat(forms(), 8)
    assert [view.stride() for view in flat.views] == [form.stride() for form in forms()]
    assert [view.dtype for view in flat.views] == [form.dtype for form in forms()]
    assert [len(piece) % 8 for piece in flat.pieces] == [0] * 4
