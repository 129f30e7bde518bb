"""Proves that the ledger of samples is a function of what was consumed alone, and sees loss, repetition and disorder.

pytest tests/training/test_ledger.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.blocks import BlockOrder
from training.ledger import Data, Ledger, Sums, derive
from training.order import Order, Share, Slots
from training.schedule import BatchPlan


def cut(n: int, plan: BatchPlan, rank: int = 0, drop_last: bool = False, seed: int = 0) -> Slots:
    return Slots(Order(n, seed), plan, rank, drop_last)


def consume(slots: Slots, ledger: Ledger, samples: int, steps: int) -> int:
    """Enter `steps` steps; returns the state after them."""
    for share in islice(slots.shares(samples), steps):
        ledger.add(share)
        samples = share.samples
    return samples


def attempt(
    n: int, world_size: int, kept: dict[str, Any] | None, begun: tuple[int, int], steps: int, drop_last: bool = False
) -> tuple[dict[str, Any], tuple[int, int]]:
    """All ranks of an attempt with a global batch of 12: the ledger it would save, and its (step, samples)."""
    step, samples = begun
    parts, after = [], samples
    for rank in range(world_size):
        slots = cut(n, BatchPlan(12 // world_size, 1, world_size), rank, drop_last)
        ledger = Ledger.start(slots) if kept is None else Ledger.resume(kept, slots, step, samples)
        after = consume(slots, ledger, samples, steps)
        parts.append(ledger.part())
    return Ledger.total(parts), (step + steps, after)


@settings(max_examples=40)
@given(
    n=st.integers(12, 400),
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=4),
    steps=st.integers(1, 25),
    drop_last=st.booleans(),
)
def test_attempts_of_any_world_size_add_up_to_what_the_order_says(
    n: int, worlds: list[int], steps: int, drop_last: bool
) -> None:
    kept, state = None, (0, 0)
    for world_size in worlds:
        kept, state = attempt(n, world_size, kept, state, steps, drop_last)
    assert kept is not None
    data = Data(**kept["data"])
    assert kept["samples"] == state[1] == data.consumed(state[0])
    assert Sums.read(kept) == derive(data, 0, state[1])
    assert kept["since"] == {"step": 0, "samples": 0}


@pytest.mark.parametrize("worlds", [[1], [2], [3, 1, 2]])
def test_data_in_shards_are_derived_in_their_own_order(worlds: list[int]) -> None:
    sizes = [7, 7, 7, 0, 12, 7, 20]
    kept: dict[str, Any] = {}
    samples = 0
    for world_size in worlds:
        order = BlockOrder(60, 3, True, sizes, 12, 4, 8)
        slots = [Slots(order, BatchPlan(12 // world_size, 1, world_size), rank) for rank in range(world_size)]
        ledgers = [Ledger.resume(kept, s, 0, samples) if kept else Ledger.start(s) for s in slots]
        for ledger, mine in zip(ledgers, slots, strict=True):
            for share, _ in zip(mine.shares(samples), range(6), strict=False):
                ledger.add(share)
        samples += 6 * 12
        kept = json.loads(json.dumps(Ledger.total([ledger.part() for ledger in ledgers])))
    data = Data(**kept["data"])
    assert (data.shards, data.lanes, data.window) == ([[7, 3], [0, 1], [12, 1], [7, 1], [20, 1]], 4, 8)
    assert Sums.read(kept) == derive(data, 0, samples)
    assert Sums.read(kept) != derive(replace(data, shards=None), 0, samples)


def test_the_hashes_never_change() -> None:
    """These values stand in checkpoints."""
    sums = derive(Data(100, 96, 32, False, 7, True), 0, 200)
    assert (sums.samples, sums.order, sums.set) == (
        200,
        "b0cfe0847ecef390aa8ad52d3292efdb",
        "3615a58096ce222f9dd29ef085ec1ecd",
    )


def test_parts_are_counted_once_however_often_they_are_asked_for() -> None:
    slots = cut(50, BatchPlan(4, 1, 1))
    ledger = Ledger.start(slots)
    consume(slots, ledger, 0, 3)
    assert ledger.part() == ledger.part()
    consume(slots, ledger, 12, 20)
    assert Sums.read(ledger.part()) == derive(Data.of(slots), 0, 90)


def test_many_ids_in_one_step_and_many_steps_are_hashed_alike() -> None:
    sums = []
    for per_rank in (5000, 10):
        slots = cut(20_000, BatchPlan(per_rank, 1, 1))
        ledger = Ledger.start(slots)
        consume(slots, ledger, 0, 20_000 // per_rank)
        sums.append(Sums.read(ledger.part()))
    assert sums[0] == sums[1] == derive(Data.of(slots), 0, 20_000)


def test_a_step_after_the_last_checkpoint_does_not_count_twice() -> None:
    saved, state = attempt(100, 2, None, (0, 0), 5)
    attempt(100, 2, saved, state, 3)  # killed before it saved
    again, (_, samples) = attempt(100, 2, saved, state, 2)
    assert again["samples"] == samples == 84
    assert Sums.read(again) == derive(Data(**again["data"]), 0, 84)


def test_an_idle_share_consumed_nothing() -> None:
    slots = cut(5, BatchPlan(2, 1, 2))
    (share,) = islice(slots.shares(4), 1)
    assert share.idle
    ledger = Ledger.start(slots)
    ledger.add(share)
    assert Sums.read(ledger.part()) == Sums()


def _share(ids: list[int], position: int) -> Share:
    return Share([np.array(ids, dtype=np.int64)], False, len(ids), position + len(ids), position)


def _sums(*shares: Share) -> Sums:
    ledger = Ledger.start(cut(8, BatchPlan(4, 1, 1)))
    for share in shares:
        ledger.add(share)
    return Sums.read(ledger.part())


@pytest.mark.parametrize(
    ("ids", "same_set"),
    [
        ([0, 1, 3, 2], True),
        ([0, 1, 2, 2], False),
        ([0, 1, 2, 4], False),
    ],
    ids=["swapped", "repeated", "another"],
)
def test_disorder_is_told_from_loss_and_repetition(ids: list[int], same_set: bool) -> None:
    good, other = _sums(_share([0, 1, 2, 3], 0)), _sums(_share(ids, 0))
    assert good.order != other.order
    assert (good.set == other.set) is same_set


def test_a_sample_of_another_epoch_is_another_sample() -> None:
    first = _sums(_share([0, 1, 2, 3], 0), _share([4, 5, 6, 7], 4))
    moved = _sums(_share([0, 1, 2, 3], 0), _share([4, 5, 6, 7], 12))
    assert first.set != moved.set


def test_any_two_swaps_of_a_long_run_differ() -> None:
    """A thousand transpositions of ten thousand ids: no two have the same hash, in either lane."""
    ids = np.arange(10_000)
    seen: set[int] = set()
    for other in range(1, 1001):
        swapped = ids.copy()
        swapped[[0, other]] = swapped[[other, 0]]
        lanes = _sums(Share([swapped], False, 10_000, 10_000, 0)).lanes
        seen |= set(lanes[:2])
    assert len(seen) == 2000


def test_a_whole_epoch_is_proved_a_permutation() -> None:
    """Derived over 0..n-1, the set hash equals that of the samples which the order really gave."""
    slots = cut(777, BatchPlan(7, 1, 1))
    ledger = Ledger.start(slots)
    consume(slots, ledger, 0, 222)
    assert Sums.read(ledger.part()).set == derive(Data.of(slots), 0, 1554).set


@pytest.mark.parametrize("kept", [{}, {"format": 2}], ids=["none", "a later format"])
def test_a_checkpoint_without_a_ledger_begins_one(kept: dict[str, Any]) -> None:
    slots = cut(50, BatchPlan(4, 1, 1))
    ledger = Ledger.resume(kept, slots, 3, 12)
    consume(slots, ledger, 12, 2)
    total = Ledger.total([ledger.part()])
    assert total["since"] == {"step": 3, "samples": 12}
    assert Sums.read(total) == derive(Data.of(slots), 12, 20)


def test_another_order_begins_a_new_ledger() -> None:
    before, after = cut(50, BatchPlan(4, 1, 1)), cut(50, BatchPlan(4, 1, 1), seed=1)
    ledger = Ledger.start(before)
    consume(before, ledger, 0, 2)
    total = Ledger.total([Ledger.resume(ledger.part(), after, 2, 8).part()])
    assert (total["data"]["seed"], total["samples"], total["since"]) == (1, 0, {"step": 2, "samples": 8})


@pytest.mark.parametrize(("drop_last", "states"), [(False, [0, 4, 8, 10, 14]), (True, [0, 4, 8, 12, 16])])
def test_samples_of_a_number_of_steps(drop_last: bool, states: list[int]) -> None:
    data = Data.of(cut(10, BatchPlan(4, 1, 1), drop_last=drop_last))
    assert [data.consumed(step) for step in range(5)] == states
    assert [data.consumed(4 - step, states[step]) for step in range(5)] == [states[4]] * 5
