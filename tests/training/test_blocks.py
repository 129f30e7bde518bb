"""Proves that the order of sharded samples is one permutation for every world size, of which a node reads its share.

pytest tests/training/test_blocks.py
"""

from __future__ import annotations

import tracemalloc
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.blocks import BlockOrder, order_of
from training.config import DataConfig
from training.errors import DataError
from training.order import Indices, Order, Slots
from training.permute import Permutation
from training.schedule import BatchPlan

shards = st.lists(st.integers(0, 90), min_size=1, max_size=30).filter(lambda sizes: sum(sizes) > 0)
small = st.integers(1, 50)


def order(sizes: list[int], global_size: int, lanes: int = 64, window: int = 16384, seed: int = 0) -> BlockOrder:
    return BlockOrder(sum(sizes), seed, True, sizes, global_size, lanes, window)


def whole(made: Order, epoch: int = 0) -> Indices:
    return made.indices(epoch, 0, made.n)


@given(shards, small, small, small, st.integers(0, 100))
def test_an_epoch_is_a_bijection(sizes: list[int], global_size: int, lanes: int, window: int, epoch: int) -> None:
    made = order(sizes, global_size, lanes, window)
    assert np.array_equal(np.sort(whole(made, epoch)), np.arange(made.n))


@given(shards, small, small, small, st.data())
def test_any_position_can_be_asked_alone(
    sizes: list[int], global_size: int, lanes: int, window: int, data: st.DataObject
) -> None:
    made = order(sizes, global_size, lanes, window)
    start = data.draw(st.integers(0, made.n))
    np.testing.assert_array_equal(made.indices(3, start, made.n), whole(made, 3)[start:])


@given(shards, small, st.sampled_from([(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]), st.booleans())
def test_the_ranks_together_take_the_same_global_order_at_every_world_size(
    sizes: list[int], lanes: int, cut: tuple[int, int], drop: bool
) -> None:
    plan, made = BatchPlan(cut[0], 1, cut[1]), order(sizes, 12, lanes, 7)
    ranks = [Slots(made, plan, rank, drop) for rank in range(plan.world_size)]
    steps = ranks[0].epoch_steps
    union: list[int] = []
    for shares in zip(*(islice(own.shares(0), steps) if steps else [] for own in ranks), strict=True):
        union += [i for share in shares if not share.idle for part in share.micro_batches for i in part.tolist()]
    assert union == made.indices(0, 0, ranks[0].epoch_samples).tolist()


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize("lanes", [8, 64])
def test_a_node_reads_its_share_of_the_shards(nodes: int, lanes: int) -> None:
    """Of 400 shards of unequal sizes; a lane's first and last shard may be those of its neighbours too."""
    sizes = np.random.default_rng(0).integers(20, 200, 400).tolist()
    made = order(sizes, 256, lanes, 512)
    ends = np.cumsum(sizes)
    epoch = whole(made)[: made.n // 256 * 256].reshape(-1, 256)
    for own in np.split(epoch, nodes, axis=1):
        read = {int(s) for s in np.unique(np.searchsorted(ends, own.ravel(), side="right"))}
        share = sum(sizes[s] for s in read) / made.n
        assert share < 1 / nodes + (lanes / nodes + 1) * max(sizes) / made.n
        if lanes == 8:
            assert share < 1.1 / nodes


def test_a_lane_is_read_window_by_window() -> None:
    """One lane, shards in their own order: a sample is never further away than its window."""
    made = order([5000], 10, 1, 100)
    places = whole(made)
    assert np.array_equal(places // 100, np.arange(5000) // 100)
    windows = places.reshape(50, 100) % 100
    assert len({tuple(window) for window in windows.tolist()}) == 50


def test_few_shards_are_open_at_a_time() -> None:
    """Each lane reads the shards of one window, so at most window / smallest shard + 2 of them."""
    made = order([100] * 192, 64, 8, 150)
    epoch = whole(made).reshape(-1, 64)[:, :8] // 100  # lane 0
    for start in range(0, len(epoch) - 16, 16):
        assert len(np.unique(epoch[start : start + 16])) <= 4


def test_shards_and_windows_are_shuffled_anew_in_each_epoch() -> None:
    sizes = [50] * 100
    first, second, other = (whole(order(sizes, 32, 8, 200, s), e) for s, e in ((0, 0), (0, 1), (1, 0)))
    for one in (second, other):
        assert (first == one).mean() < 0.01
        assert abs(np.corrcoef(first, one)[0, 1]) < 0.2
    heads = {int(order(sizes, 32, 8, 200, seed).indices(0, 0, 1)[0]) // 50 for seed in range(300)}
    assert len(heads) > 80


def test_each_sample_comes_equally_often_first_in_its_window() -> None:
    counts = np.zeros(20)
    for seed in range(2000):
        counts[order([20], 1, 1, 20, seed).indices(0, 0, 1)] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 75  # 1e-8 quantile, 19 degrees free


def test_the_order_of_a_seed_never_changes() -> None:
    """These values are a promise to every run that resumes after an upgrade."""
    assert whole(order([3, 4, 5], 4, 2, 3)).tolist() == [8, 7, 1, 3, 9, 11, 2, 4, 10, 0, 6, 5]
    late = order([10**9] * 1000, 4096).indices(7, 9 * 10**11, 9 * 10**11 + 3)
    assert late.tolist() == [36062490819, 36062501300, 36062497625]


def test_seeking_late_costs_no_more_than_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    at = Permutation.at

    def counted(self: Permutation, positions: Indices, *more: Indices) -> Indices:
        asked.append(positions.size)
        return at(self, positions, *more)

    monkeypatch.setattr(Permutation, "at", counted)
    work = []
    for start in (0, 9 * 10**9):
        made = order([10**6] * 10**4, 4096)
        asked.clear()
        tracemalloc.start()
        made.indices(0, start, start + 4096)
        work.append((asked.copy(), tracemalloc.get_traced_memory()[1] < 3_000_000))
        tracemalloc.stop()
    assert work == [([4096, 10**4], True)] * 2


def test_a_dataset_with_shard_sizes_gets_an_order_of_blocks() -> None:
    class Plain:
        def __len__(self) -> int:
            return 7

    class Sharded(Plain):
        shard_sizes = (3, 4)

    config = DataConfig(lanes=2, window=3)
    assert order_of(Plain(), 5, config, 4) == Order(7, 5)
    assert order_of(Sharded(), 5, config, 4) == BlockOrder(7, 5, True, (3, 4), 4, 2, 3)


def test_without_shuffling_it_is_the_identity() -> None:
    assert BlockOrder(6, 0, False, [2, 4], 2).indices(0, 1, 5).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [([3, 3], "2 shards hold 6 samples, but the dataset's length is 7"), ([-1, 8], "no list"), ([3.5, 3.5], "no list")],
)
def test_sizes_that_cannot_be_are_refused(sizes: list[int], words: str) -> None:
    with pytest.raises(DataError, match=words):
        BlockOrder(7, 0, True, sizes, 2)
