"""What a drill does to a run, and where: a pure function of the seed and of the run's size.

The run's steps are cut at its saves into segments. Most faults leave a run where it was: it comes back to the save
before. Of those a segment takes any number. Others let it get on: a clean stop, which saves; a kill when the checkpoint
is published already; a full disk, after which training goes on. Of those a segment has one, as its last. So each
fault is met, whatever the number of them, and the run ends with the last one behind it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from training.rehearsal import OF_OTHERS, OF_RANK_0, PUBLISHED, SURE_OF_OTHERS, Action, Fault, Where

T = TypeVar("T")
Kind = tuple[Action, Where]
EVERY_KIND: tuple[Kind, ...] = (
    *(("rank", "step"), ("rank", "step"), ("all", "step"), ("host", "step"), ("stop", "step")),
    *(("rank", "save"), ("rank", "save"), ("rank", "save"), ("all", "save"), ("all", "save"), ("host", "save")),
    *(("stop", "save"), ("full", "save"), ("full", "save")),
)
"""Kinds of faults, as often as they come in a round."""
ENDING = tuple(kind for kind in EVERY_KIND if kind[0] != "full")
"""Those that end an attempt, so that another one follows."""


def plan(
    seed: str, count: int, steps: int, every: int, ranks: int, retried: bool, round_: Sequence[Kind] = EVERY_KIND
) -> list[Fault]:
    """`count` faults, in their order, for a run of `steps` steps that saves after each `every` of them and at its end.

    `ranks`: the ranks that may act. `retried`: whether a save that failed is tried again. Of the kinds of `round_`, and
    of all operations that a save has for kills in it, each comes before one comes again.
    """
    chance = random.Random(f"drill/{seed}")
    ends = [*range(every, steps, every), steps]
    kinds, points = _endless(chance, round_), _endless(chance, _points(ranks))
    room, drawn, filled = len(ends), list[Fault](), 0
    while len(drawn) < count:
        action, where = next(kinds)
        rank, operation = chance.randrange(ranks), 0
        if where == "save" and action in ("rank", "all", "host"):
            rank, operation = next(points)
            rank = rank and chance.randrange(1, ranks)
        elif where == "save":
            operation = chance.randrange(PUBLISHED - 1 if rank == 0 else SURE_OF_OTHERS)
        whole = action == "full" and (not retried or filled % 2 == 0)
        fault = Fault(0, action, where, 0, rank, operation, chance.random(), whole)
        if segments(fault) <= room:
            room -= segments(fault)
            filled += action == "full"
            drawn.append(fault)
    return _placed(chance, drawn, ends)


def segments(fault: Fault) -> int:
    """How many segments the run is further after it, at most.

    A full disk is felt until the next save is due, and a stop comes some steps after it was asked for.
    """
    if fault.action in ("full", "stop"):
        return 2
    published = fault.operation >= (PUBLISHED if fault.rank == 0 else len(OF_OTHERS))
    return int(fault.where == "save" and published)


def attempts(faults: Sequence[Fault], strict: bool) -> list[list[Fault]]:
    """The faults of each attempt, of which the last one ends it. `strict`: a save that fails does so, too."""
    cut: list[list[Fault]] = [[]]
    for fault in faults:
        cut[-1].append(fault)
        if ends(fault, strict):
            cut.append([])
    return [part for part in cut if part]


def ends(fault: Fault, strict: bool) -> bool:
    """Whether the attempt that meets it is over then."""
    return fault.action != "full" or (strict and fault.whole)


def _points(ranks: int) -> list[tuple[int, int]]:
    """(0, operation) for rank 0, (1, operation) for any other one; each with a last one after its operations."""
    first = [(0, operation) for operation in range(len(OF_RANK_0) + 1)]
    return first + [(1, operation) for operation in range(len(OF_OTHERS) + 1) if ranks > 1]


def _placed(chance: random.Random, drawn: list[Fault], ends: list[int]) -> list[Fault]:
    """Give each fault its segment, its step and its number."""
    carrying = [fault for fault in drawn if segments(fault)]
    line: list[Fault | None] = [*carrying, *[None] * (len(ends) - sum(map(segments, carrying)))]
    chance.shuffle(line)
    last: dict[int, Fault | None] = {}
    segment = 0
    for item in line:
        last[segment] = item
        segment += segments(item) if item is not None else 1
    met: dict[int, list[Fault]] = {segment: [] for segment in last}
    for fault in drawn:
        if not segments(fault):
            met[chance.choice(list(met))].append(fault)
    placed: list[Fault] = []
    for segment, faults in met.items():
        begin, end = ends[segment - 1] if segment else 0, ends[segment]
        carried = last[segment]
        for fault in faults if carried is None else [*faults, carried]:
            step = end if fault.where == "save" else chance.randint(begin + 1, end)
            placed.append(replace(fault, number=len(placed) + 1, step=step))
    return placed


def _endless(chance: random.Random, items: Sequence[T]) -> Iterator[T]:
    """All items in a random order, then all in another one, and so on."""
    while True:
        yield from chance.sample(items, len(items))
