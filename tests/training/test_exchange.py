"""Proves that gradients exchanged in one round are those of DDP's own all-reduce, and the same bits on all ranks.

pytest tests/training/test_exchange.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training.exchange import LITTLE, Exchange
from training.ranks import Ranks
from training.run import process_group

Gang = Callable[..., list[Any]]
CPU = torch.device("cpu")


def model(dtype: torch.dtype) -> nn.Module:
    """Of more than one bucket, when a bucket takes a thousandth of a megabyte."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 1)).to(dtype)


def _trained(ranks: Ranks, dtype: torch.dtype, ours: bool) -> list[bytes]:
    """Gradients of a few steps, in which DDP lays out its buckets anew, and with steps that are not exchanged."""
    with process_group(ranks, CPU):
        ddp = DistributedDataParallel(model(dtype), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
        exchange = Exchange(ranks)
        if ours:
            ddp.register_comm_hook(None, lambda _, bucket: exchange.average(bucket))
        found = []
        generator = torch.Generator().manual_seed(ranks.rank)
        for step in range(4):
            with ddp.no_sync():
                ddp(torch.randn(3, 40, generator=generator, dtype=dtype)).sum().backward()
            (ddp(torch.randn(5, 40, generator=generator, dtype=dtype)) * 10.0**step).sum().backward()
            found.append(
                torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None]).numpy().tobytes()
            )
            ddp.zero_grad()
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_ranks_get_the_bits_of_an_all_reduce(gang: Gang, dtype: torch.dtype) -> None:
    ours, plain = gang(2, _trained, dtype, True), gang(2, _trained, dtype, False)
    assert ours[0] == ours[1] == plain[0]


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_get_the_same_bits_as_each_other_and_an_all_reduce_up_to_rounding(
    gang: Gang, world_size: int
) -> None:
    ours, plain = (gang(world_size, _trained, torch.float64, own) for own in (True, False))
    assert all(gradients == ours[0] for gradients in ours)
    for mine, theirs in zip(ours[0], plain[0], strict=True):
        one, other = (torch.frombuffer(bytearray(found), dtype=torch.float64) for found in (mine, theirs))
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class _Bucket:
    """What DDP hands to a hook."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def index(self) -> int:
        return 0

    def buffer(self) -> Tensor:
        return self._values


def _one_after_another(ranks: Ranks) -> list[list[float]]:
    with process_group(ranks, CPU):
        exchange, found = Exchange(ranks), []
        for dtype in (torch.float32, torch.float64, torch.float32):
            values = torch.full((3,), 1.0 + 2.0 * ranks.rank, dtype=dtype)
            found.append(exchange.average(_Bucket(values)).wait().tolist())
        return found


@pytest.mark.parametrize(("world_size", "mean"), [(2, 2.0), (3, 3.0)])
def test_a_bucket_of_another_type_may_take_the_place_of_one(gang: Gang, world_size: int, mean: float) -> None:
    for found in gang(world_size, _one_after_another):
        assert [value for values in found for value in values] == pytest.approx([mean] * 9)


def _sum_of_integers(ranks: Ranks) -> list[float]:
    with process_group(ranks, CPU):
        ddp = DistributedDataParallel(nn.Linear(4, 1, bias=False))
        exchange = Exchange(ranks)
        ddp.register_comm_hook(None, lambda _, bucket: exchange.average(bucket))
        ddp(torch.full((1, 4), 8.0 * (ranks.rank + 1))).sum().backward()
        assert isinstance(ddp.module.weight.grad, Tensor)
        return ddp.module.weight.grad.flatten().tolist()


@pytest.mark.parametrize(("world_size", "mean"), [(2, 12.0), (4, 20.0)])
def test_the_gradient_is_the_mean_over_the_ranks(gang: Gang, world_size: int, mean: float) -> None:
    assert gang(world_size, _sum_of_integers) == [[mean] * 4] * world_size


def test_two_ranks_on_cpus_always_swap_and_more_only_little() -> None:
    large, little = nn.Linear(2000, 2000), nn.Linear(10, 10)
    assert Exchange.pays(list(large.parameters()), Ranks(world_size=2))
    assert not Exchange.pays(list(large.parameters()), Ranks(world_size=3))
    assert Exchange.pays(list(little.parameters()), Ranks(world_size=8))
    floats = LITTLE // 4 // 4
    assert Exchange.pays([torch.zeros(floats)], Ranks(world_size=4))
    assert not Exchange.pays([torch.zeros(floats + 1)], Ranks(world_size=4))
    assert not Exchange.pays([torch.zeros(10, device="meta")], Ranks(world_size=2))
