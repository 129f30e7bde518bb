"""The fixed tree in which the micro-batches of a step are added up, whatever rank computed which of them.

A step's micro-batches are numbered 0..V-1 over all ranks, V = accumulate x world_size; rank r has those from
r x accumulate on. They are the leaves: leaves 2i and 2i + 1 are added first, then the sums of two such pairs, and so
on. Where one side of an addition has no leaf, the other side is the sum; the last batch of an epoch has fewer leaves.

    V = 6: ((0 + 1) + (2 + 3)) + (4 + 5)

Of two ranks the first then has 0, 1, 2 and the second 3, 4, 5. The first can add 0 + 1 and the second 4 + 5 at once;
the rest is added of the four sums that they tell each other: 0 + 1, 2, 3, 4 + 5.

An addition of floating point numbers is commutative but not associative, so the sum of all is fixed by the shape of
the tree, which is a function of the number of leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Plan(NamedTuple):
    """What one rank does in a step with a given number of leaves.

    An addition takes the two last sums that are left. How many of them follow each sum is what the plan says.
    """

    leaves: Sequence[int]
    """Numbers of this rank's leaves; none where the ranks before it have them all."""
    adding: Sequence[int]
    """How many additions are due after each of them."""
    held: Sequence[int]
    """How many sums each rank is then left with, for want of the other ranks'."""
    rest: Sequence[int]
    """How many additions are due after each of all ranks' sums, rank by rank. One sum is left in the end."""


@lru_cache(maxsize=64)
def plan(count: int, accumulate: int, world_size: int, rank: int) -> Plan:
    """The plan of a rank for a step of `count` leaves, at least one and at most accumulate x world_size."""
    over_all = count.bit_length() + 1
    heights = [over_all, *(((leaf - 1) ^ leaf).bit_length() for leaf in range(1, count)), over_all]
    runs = [range(min(count, r * accumulate), min(count, (r + 1) * accumulate)) for r in range(world_size)]
    found = [additions(heights[run.start : run.stop + 1]) for run in runs]
    joints = [over_all]
    for run, (_, open_joints) in zip(runs, found, strict=True):
        joints += [*open_joints, heights[run.stop]] if run else []
    held = [len(adding) - sum(adding) for adding, _ in found]
    rest, _ = additions(joints)
    return Plan(runs[rank], found[rank][0], held, rest)


def additions(heights: Sequence[int]) -> tuple[list[int], list[int]]:
    """How many additions are due after each of some neighbouring sums, and the heights of the joints that stay open.

    `heights`: of the joint before the first sum, between each two, and after the last. The height of a joint is that of
    the addition in the tree which brings its two sides together; a joint is closed when all lower ones on both of its
    sides are. The first and the last joint are those to sums of other ranks, and stay open.
    """
    counts: list[int] = []
    joints: list[int] = []
    before, closed_off = heights[0], 0
    for after in heights[1:]:
        count = 0
        while len(joints) > closed_off and joints[-1] < after:
            joints.pop()
            count += 1
        counts.append(count)
        joints.append(after)
        if after > before:  # what is left of this joint has first to be added to what another rank holds
            before, closed_off = after, len(joints)
    return counts, joints[:-1]


def add_up(sums: Iterable[T], due: Iterable[int], add: Callable[[T, T], T]) -> list[T]:
    """Add as planned, by `add(left, right)`. Returns what is left."""
    left: list[T] = []
    for item, count in zip(sums, due, strict=True):
        left.append(item)
        for _ in range(count):
            right = left.pop()
            left[-1] = add(left[-1], right)
    return left
