"""Proves that the order of samples is a permutation that nothing but (seed, epoch) enters, and that ranks share it out.

pytest tests/training/test_order.py
"""

from __future__ import annotations

import tracemalloc
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.order import Indices, Order, Share, Slots
from training.permute import Permutation
from training.schedule import BatchPlan

sizes = st.integers(1, 3000)
seeds = st.integers(-(2**63), 2**63 - 1)


def slots(n: int, plan: BatchPlan, rank: int, drop_last: bool = False, seed: int = 0) -> Slots:
    return Slots(Order(n, seed), plan, rank, drop_last)


def take(cut: Slots, samples: int, count: int) -> list[Share]:
    return list(islice(cut.shares(samples), count))


@given(sizes, seeds, st.integers(0, 10**6))
def test_an_epoch_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert sorted(Order(n, seed).indices(epoch, 0, n).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [2**17, 2**17 + 1, 100_003])
def test_a_large_epoch_is_a_bijection(n: int) -> None:
    seen = np.zeros(n, dtype=np.int8)
    seen[Order(n, 1).indices(0, 0, n)] += 1
    assert seen.all()


@given(sizes, seeds, st.data())
def test_any_position_can_be_asked_alone(n: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    order = Order(n, seed)
    np.testing.assert_array_equal(order.indices(5, start, stop), order.indices(5, 0, n)[start:stop])


def test_the_order_of_a_seed_never_changes() -> None:
    """These values are a promise to every run that resumes after an upgrade."""
    assert Order(10, 0).indices(0, 0, 10).tolist() == [7, 8, 6, 0, 5, 9, 3, 4, 1, 2]
    assert Order(10**12, 42).indices(7, 10**11, 10**11 + 3).tolist() == [870842138230, 922360986832, 732237828662]


def test_seeds_and_epochs_differ_and_no_shuffle_is_the_identity() -> None:
    first = Order(1000, 0).indices(0, 0, 1000)
    for other in (Order(1000, 0).indices(1, 0, 1000), Order(1000, 1).indices(0, 0, 1000)):
        assert (first == other).mean() < 0.02
    assert Order(9, 0, shuffle=False).indices(3, 2, 6).tolist() == [2, 3, 4, 5]


def test_each_sample_is_equally_likely_at_each_position() -> None:
    """Chi-square of the (position, sample) table over 3,000 seeds; 56 is its 1e-6 quantile, 16 degrees free."""
    n = 5
    table = np.zeros((n, n))
    for seed in range(3_000):
        table[np.arange(n), Order(n, seed).indices(0, 0, n)] += 1
    expected = 3_000 / n
    assert ((table - expected) ** 2 / expected).sum() < 56.0


def test_neighbours_are_not_related() -> None:
    """Correlation of one position's sample with the next's, in 10^5: a fair shuffle stays within 5 / sqrt(n)."""
    picked = Order(100_000, 0).indices(0, 0, 100_000).astype(float)
    assert abs(np.corrcoef(picked[:-1], picked[1:])[0, 1]) < 5 / np.sqrt(100_000)


def test_memory_does_not_grow_with_the_data() -> None:
    tracemalloc.start()
    Order(10**10, 0).indices(3, 9 * 10**9, 9 * 10**9 + 100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_a_resume_late_in_an_epoch_asks_for_no_more_than_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step at 0% and at 90% of an epoch of 10^10 samples: the same positions in number, the same memory."""
    asked: list[int] = []
    at = Permutation.at

    def counted(self: Permutation, positions: Indices) -> Indices:
        asked.append(positions.size)
        return at(self, positions)

    monkeypatch.setattr(Permutation, "at", counted)
    cut, work = slots(10**10, BatchPlan(32, 1, 4), 3), []
    for state in (0, 9 * 10**9, 10**10 + 128):
        asked.clear()
        tracemalloc.start()
        assert next(cut.shares(state)).samples == state + 128
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        work.append((asked.copy(), peak < 1_000_000))
    assert work == [([8192], True)] * 3


@settings(max_examples=60)
@given(
    n=st.integers(1, 400),
    per_rank=st.integers(1, 6),
    accumulate=st.integers(1, 3),
    world_size=st.integers(1, 7),
    drop_last=st.booleans(),
)
def test_the_ranks_together_take_the_global_order(
    n: int, per_rank: int, accumulate: int, world_size: int, drop_last: bool
) -> None:
    plan = BatchPlan(per_rank, accumulate, world_size)
    cuts = [slots(n, plan, rank, drop_last) for rank in range(world_size)]
    if not cuts[0].epoch_samples:
        assert drop_last and n < plan.global_size
        return
    steps = cuts[0].epoch_steps
    union: list[int] = []
    for shares in zip(*(take(cut, 0, steps) for cut in cuts), strict=True):
        own = [[int(i) for part in share.micro_batches for i in part] for share in shares if not share.idle]
        assert len({share.samples for share in shares}) == 1
        assert sum(map(len, own)) == shares[0].global_size
        assert max(map(len, own)) - min(len(o) for o in [*own, *([[]] if len(own) < world_size else [])]) <= 1
        for share in shares:
            assert 1 <= len(share.micro_batches) <= accumulate
            assert all(1 <= len(part) <= per_rank for part in share.micro_batches)
        union += [i for part in own for i in part]
        assert shares[0].samples == len(union)
    assert union == Order(n, 0).indices(0, 0, cuts[0].epoch_samples).tolist()


@settings(max_examples=40)
@given(n=st.integers(1, 300), step=st.integers(0, 40), worlds=st.permutations([1, 2, 3, 4, 6]))
def test_resuming_at_another_world_size_goes_on_in_the_same_order(n: int, step: int, worlds: list[int]) -> None:
    before, after = (BatchPlan(12 // world, 1, world) for world in worlds[:2])
    state = take(slots(n, before, 0), 0, step + 1)[-1].samples
    whole = take(slots(n, BatchPlan(12, 1, 1), 0), 0, step + 4)
    resumed = [take(slots(n, after, rank), state, 3) for rank in range(after.world_size)]
    for number, wanted in enumerate(whole[step + 1 :]):
        mine = [part for shares in resumed if not shares[number].idle for part in shares[number].micro_batches]
        np.testing.assert_array_equal(np.concatenate(mine), np.concatenate(wanted.micro_batches))
        assert {shares[number].samples for shares in resumed} == {wanted.samples}


def test_a_step_of_a_tail_by_hand() -> None:
    order = Order(11, 0, shuffle=False)
    cuts = [Slots(order, BatchPlan(2, 2, 2), rank) for rank in range(2)]
    assert cuts[0].epoch_steps == 2
    shown = [[[part.tolist() for part in s.micro_batches] for s in take(cut, 0, 2)] for cut in cuts]
    assert shown == [[[[0, 1], [2, 3]], [[8]]], [[[4, 5], [6, 7]], [[9, 10]]]]


def test_a_rank_without_a_sample_is_idle_on_a_sample_of_the_epoch() -> None:
    cut = Slots(Order(5, 0, shuffle=False), BatchPlan(2, 1, 2), 0)
    share = take(cut, 4, 1)[0]
    assert share.idle and [part.tolist() for part in share.micro_batches] == [[4]]
    assert (share.global_size, share.samples) == (1, 5)


@settings(max_examples=60)
@given(
    n=st.integers(1, 300), per_rank=st.integers(1, 5), total=st.sampled_from([1, 4, 6, 12]), state=st.integers(0, 400)
)
def test_filled_micro_batches_are_the_same_ones_at_each_number_of_ranks(
    n: int, per_rank: int, total: int, state: int
) -> None:
    wanted = None
    for world_size in (size for size in range(1, total + 1) if total % size == 0):
        plan = BatchPlan(per_rank, total // world_size, world_size)
        ranks = [take(Slots(Order(n, 0), plan, rank, filled=True), state, 3) for rank in range(world_size)]
        found = []
        for shares in zip(*ranks, strict=True):
            taken = [share for share in shares if not share.idle]
            found.append([part.tolist() for share in taken for part in share.micro_batches])
            assert [len(part) for part in found[-1][:-1]] == [per_rank] * (len(found[-1]) - 1)
            assert [share.idle for share in shares] == [False] * len(taken) + [True] * (world_size - len(taken))
            assert {share.position for share in taken[:1]} == {shares[0].samples - shares[0].global_size}
        wanted = wanted or found
        assert found == wanted


def test_an_empty_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="no sample"):
        next(slots(3, BatchPlan(4, 1, 1), 0, drop_last=True).shares(0))
