"""Proves that keyed permutations are bijections for every n, and that no statistic tells them from fair shuffles.

pytest tests/training/test_permute.py

Each statistical test uses fixed keys, so it passes always or never. A chi-square statistic is compared with the
1e-6 quantile of its distribution, in the normal approximation mean + 5 deviations.
"""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.permute import LARGEST, Indices, Permutation


def whole(n: int, key: str) -> Indices:
    return Permutation(n, key).at(np.arange(n))


def excess(counts: np.ndarray, expected: float, fixed: int) -> float:
    """Chi-square of counts that should be equal, in standard deviations above its mean; `fixed`: bound sums."""
    free = counts.size - fixed
    return float((((counts - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free))


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers went through the network, one entry a call."""
    seen: list[int] = []
    network = Permutation._network

    def counted(self: Permutation, values: np.ndarray, names: np.ndarray | None) -> np.ndarray:
        seen.append(len(values))
        return network(self, values, names)

    monkeypatch.setattr(Permutation, "_network", counted)
    return seen


@given(st.integers(1, 5000), st.text(max_size=20))
def test_it_is_a_bijection(n: int, key: str) -> None:
    assert np.array_equal(np.sort(whole(n, key)), np.arange(n))


@pytest.mark.parametrize("n", [255, 256, 257, 2**16, 2**17 + 1, 99_999, 316 * 316])
def test_it_is_a_bijection_at_sizes_that_barely_fit_and_barely_do_not(n: int) -> None:
    assert np.array_equal(np.sort(whole(n, "k")), np.arange(n))


@given(st.integers(1, LARGEST), st.data())
def test_at_any_size_images_differ_and_stay_in_range(n: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 1))
    images = Permutation(n, "k").at(np.arange(start, min(n, start + 500), dtype=np.int64))
    assert len(set(images.tolist())) == len(images) and images.min() >= 0 and images.max() < n


def test_positions_may_have_any_shape_and_number() -> None:
    permutation = Permutation(10**6, "k")
    positions = np.arange(30_000).reshape(3, 10, 1000)[:, ::2]
    images = permutation.at(positions)
    assert images.shape == positions.shape and images.dtype == np.int64
    assert images[2, 3, 7] == permutation.at(positions[2, 3, 7:8])[0]
    assert permutation.at(np.empty(0, dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("n", [0, -1, LARGEST + 1])
def test_a_size_that_cannot_be_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=rf"a permutation of {n} numbers; 1 to 2\^62"):
        Permutation(n, "k")


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_order_of_a_few_comes_equally_often(n: int) -> None:
    """Odd ones too: a network whose domain has an odd size would only ever make even permutations."""
    rounds = 30 * math.factorial(n)
    seen = Counter(tuple(whole(n, f"few/{key}").tolist()) for key in range(rounds))
    counts = np.array([*seen.values(), *[0] * (math.factorial(n) - len(seen))])
    assert excess(counts, 30, 1) < 5.0


@pytest.mark.parametrize("n", [7, 10, 33, 257, 300])
def test_each_number_comes_equally_often_first_and_each_pair_of_neighbours(n: int) -> None:
    keys = 4_000
    made = np.stack([Permutation(n, f"pairs/{key}").at(np.arange(3)) for key in range(keys)])
    assert excess(np.bincount(made[:, 0], minlength=n), keys / n, 1) < 5.0
    step = (made[:, 1:] - made[:, :2]) % n  # a fair shuffle's neighbours differ by 1..n-1, equally often
    assert excess(np.bincount(step.ravel(), minlength=n)[1:], 2 * keys / (n - 1), 1) < 5.0


@pytest.mark.parametrize("n", [1437, 2**17 + 1, 10**10])
def test_stretches_of_a_large_one_look_fair(n: int) -> None:
    """Where 100 neighbours in a row go, how far apart they land, and correlations at small distances."""
    count = min(n, 100_000)
    start = (n - count) // 2
    images = Permutation(n, "large").at(np.arange(start, start + count))
    bins = min(100, n // 10)
    assert excess(np.bincount(images * bins // n, minlength=bins), count / bins, 1) < 5.0
    lags = (1, 2, 100, math.isqrt(n), 2 * math.isqrt(n))
    for lag in (lag for lag in lags if lag < count // 2):
        assert abs(np.corrcoef(images[:-lag], images[lag:])[0, 1]) < 5 / math.sqrt(count - lag)
        apart = (images[lag:] - images[:-lag]) % n * bins // n
        assert excess(np.bincount(apart, minlength=bins), len(apart) / bins, 1) < 5.0
    assert abs(np.corrcoef(np.arange(count), images)[0, 1]) < 5 / math.sqrt(count)


def test_keys_that_differ_little_share_no_structure() -> None:
    """Of one key's order seen through another's, fixed points are Poisson(1), and shifts and bins are fair."""
    n, keys = 10_007, 40
    orders = [whole(n, f"order/0/{key}") for key in range(keys + 1)]
    fixed = sum(int((one == other).sum()) for one, other in itertools.pairwise(orders))
    assert abs(fixed - keys) < 5 * math.sqrt(keys)
    for one, other in itertools.pairwise(orders):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(n)
        assert excess(np.bincount((one - other) % n * 50 // n, minlength=50), n / 50, 1) < 5.0
    first = np.array([order[0] for order in orders])
    assert len(set(first.tolist())) > keys - 5


def test_cycles_are_as_many_as_in_a_fair_shuffle() -> None:
    """The number of cycles of a random permutation has mean H_n and variance about H_n - pi^2 / 6."""
    n, keys = 1000, 60
    total = sum(_cycles(whole(n, f"cycles/{key}").tolist()) for key in range(keys))
    mean = sum(1 / k for k in range(1, n + 1))
    assert abs(total / keys - mean) < 5 * math.sqrt((mean - math.pi**2 / 6) / keys)


def _cycles(images: list[int]) -> int:
    left, count = set(range(len(images))), 0
    while left:
        count += 1
        place = left.pop()
        while (place := images[place]) in left:
            left.remove(place)
    return count


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_a_family_has_a_bijection_for_each_name(sizes: list[int], base: int) -> None:
    positions = np.concatenate([np.arange(size) for size in sizes])
    limits = np.repeat(sizes, sizes).astype(np.int64)
    names = np.repeat((base + np.arange(len(sizes))) % 2**32, sizes).astype(np.uint32)
    images = Permutation(max(sizes), "family").at(positions, limits, names)
    for name in np.unique(names):
        own = images[names == name]
        assert sorted(own.tolist()) == list(range(len(own)))


def test_members_of_a_family_differ_as_keys_do() -> None:
    n, members = 4096, 64
    positions = np.tile(np.arange(n), members)
    names = np.repeat(np.arange(members, dtype=np.uint32), n)
    images = Permutation(n, "family").at(positions, np.full(len(positions), n), names).reshape(members, n)
    same = sum(int((one == other).sum()) for one, other in itertools.pairwise(images))
    assert abs(same - (members - 1)) < 5 * math.sqrt(members)
    for one, other in itertools.pairwise(images):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(n)


def test_the_work_is_the_same_wherever_one_looks(passed: list[int]) -> None:
    """Positions that go through the network, and memory: at 90% of 10^10 as at the start."""
    peaks = []
    for start in (0, 9 * 10**9):
        passed.clear()
        tracemalloc.start()
        Permutation(10**10, "k").at(np.arange(start, start + 8192))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(passed) < 1.01 * 8192
    assert max(peaks) < 1_000_000


def test_few_walk_back_into_range_whatever_the_size(passed: list[int]) -> None:
    """What cycle walking adds stays below one in a hundred from n = 2^17 on; a power-of-two domain would double it."""
    for n in (2**17, 2**17 + 1, 2**20 + 1, 10**6, 2**33 + 1):
        passed.clear()
        Permutation(n, "k").at(np.arange(8192))
        assert sum(passed) < 1.01 * 8192, n
