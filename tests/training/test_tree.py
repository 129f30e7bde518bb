"""Proves that the tree of a step is the same whoever holds its leaves, and that ranks do what they can by themselves.

pytest tests/training/test_tree.py
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.tree import Plan, add_up, additions, plan


def join(left: str, right: str) -> str:
    return f"({left}+{right})"


def written(leaves: list[int], low: int = 0, size: int = 1 << 20) -> str:
    """The definition: the two halves of a range whose size is a power of two, one of which may have no leaf."""
    if len(leaves) == 1:
        return str(leaves[0])
    middle = low + size // 2
    left, right = [leaf for leaf in leaves if leaf < middle], [leaf for leaf in leaves if leaf >= middle]
    if left and right:
        return f"({written(left, low, size // 2)}+{written(right, middle, size // 2)})"
    return written(left or right, low if left else middle, size // 2)


def on_ranks(count: int, accumulate: int, world_size: int) -> tuple[str, list[Plan], list[int]]:
    """What the ranks add up together, their plans, and how many sums each had at most."""
    plans = [plan(count, accumulate, world_size, rank) for rank in range(world_size)]
    exchanged: list[str] = []
    most = []
    for rank, one in enumerate(plans):
        held = add_up(map(str, one.leaves), one.adding, join)
        exchanged += held
        waiting, highest = 0, 0
        for due in one.adding:
            waiting += 1
            highest, waiting = max(highest, waiting), waiting - due
        most.append(highest)
        assert len(held) == one.held[rank]
    assert len({(tuple(one.held), tuple(one.rest)) for one in plans}) == 1
    (whole,) = add_up(exchanged, plans[0].rest, join)
    return whole, plans, most


def test_trees_by_hand() -> None:
    assert on_ranks(6, 6, 1)[0] == on_ranks(6, 3, 2)[0] == "(((0+1)+(2+3))+(4+5))"
    assert plan(6, 3, 2, 0) == Plan(range(3), [0, 1, 0], [2, 2], [0, 0, 2, 1])
    assert plan(6, 3, 2, 1) == Plan(range(3, 6), [0, 0, 1], [2, 2], [0, 0, 2, 1])
    assert on_ranks(3, 1, 4)[0] == on_ranks(3, 4, 1)[0] == "((0+1)+2)"
    assert plan(3, 1, 4, 3) == Plan(range(3, 3), [], [1, 1, 1, 0], [0, 1, 1])
    assert on_ranks(1, 1, 8)[0] == "0"


@settings(max_examples=300)
@given(total=st.sampled_from([1, 2, 3, 4, 6, 7, 8, 12, 24, 30, 32, 36, 60]), data=st.data())
def test_every_number_of_ranks_adds_in_the_same_order(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, total))
    for world_size in (n for n in range(1, total + 1) if total % n == 0):
        whole, plans, most = on_ranks(count, total // world_size, world_size)
        assert whole == written(list(range(count)))
        assert [leaf for one in plans for leaf in one.leaves] == list(range(count))
        assert max(most) <= 2 * (total // world_size).bit_length()


@pytest.mark.parametrize(("accumulate", "world_size"), [(8, 1), (4, 2), (2, 4), (1, 8), (4, 3), (2, 6), (16, 5)])
def test_a_rank_whose_micro_batches_are_a_power_of_two_sends_one_sum(accumulate: int, world_size: int) -> None:
    """So its traffic is that of a ring all-reduce."""
    assert plan(accumulate * world_size, accumulate, world_size, 0).held == [1] * world_size


def test_what_waits_for_another_rank_is_not_added_to_the_wrong_side() -> None:
    """Leaves 1, 2, 3 of 0..3: 1 waits for 0, and 2 + 3 may be added meanwhile."""
    assert additions([1, 2, 1, 9]) == ([0, 0, 1], [2])
    assert additions([9]) == ([], [])
