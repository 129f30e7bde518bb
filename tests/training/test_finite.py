"""Proves that what is not finite is found, wherever it stands, and that large numbers are not taken for it.

pytest tests/training/test_finite.py
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.finite import Gradients, all_finite, first_not_finite

NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=5), min_size=1, max_size=4), st.booleans())
def test_all_are_finite_only_if_each_is(values: list[list[float]], buckets: bool) -> None:
    wanted = all(math.isfinite(value) for row in values for value in row)
    flat = torch.tensor([value for row in values for value in row])
    parts, start = [], 0
    for row in values:
        parts.append(flat[start : start + len(row)])
        start += len(row)
    check = Gradients(buckets)
    assert check.finite(parts) == wanted
    assert check.finite(parts) == wanted
    first_not = first_not_finite({str(i): part for i, part in enumerate(parts)})
    assert (first_not is None) == wanted


def test_buckets_that_moved_are_read_where_they_are_now() -> None:
    check = Gradients(buckets=True)
    first, second = torch.zeros(6), torch.zeros(6)
    assert check.finite([first[:2], first[2:]])
    second[5] = math.nan
    assert not check.finite([second[:2], second[2:]])
    assert check.finite([first[:2], first[2:]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_every_type_is_understood(dtype: torch.dtype) -> None:
    value = torch.full((3, 2), 6e4, dtype=dtype).t()
    assert all_finite(value)
    value[1, 1] = math.inf
    assert not all_finite(value)
    assert first_not_finite({"a": torch.zeros(2, dtype=torch.int64), "b": value}) == ("b", math.inf)
