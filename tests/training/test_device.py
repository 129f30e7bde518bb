"""Proves the choice of a rank's device, whether it sees its own GPU alone or all of its node's. Needs no GPU.

pytest tests/training/test_device.py
"""

from __future__ import annotations

import pytest
import torch

from training.device import autocast, backend, choose, data_type, open_device
from training.errors import ConfigError, DeviceError
from training.ranks import Ranks

THIRD_OF_FOUR = Ranks(rank=6, local_rank=2, world_size=8, local_world_size=4, node_rank=1)


@pytest.mark.parametrize(
    ("wanted", "visible", "index"),
    [("cpu", 4, None), ("auto", 0, None), ("auto", 4, 2), ("cuda", 4, 2), ("cuda", 1, 0), ("auto", 1, 0)],
)
def test_choice(wanted: str, visible: int, index: int | None) -> None:
    assert choose(wanted, visible, THIRD_OF_FOUR) == index


def test_too_few_devices_are_refused_with_the_numbers() -> None:
    with pytest.raises(DeviceError, match="local rank 2 of 4 on node 1 has no device: it sees 2;"):
        choose("auto", 2, THIRD_OF_FOUR)
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        choose("cuda", 0, THIRD_OF_FOUR)


def test_the_cpu_is_opened_with_gloo() -> None:
    device = open_device("cpu", Ranks())
    assert device == torch.device("cpu")
    assert (backend(device), backend(torch.device("cuda", 1))) == ("gloo", "nccl")


def test_precision() -> None:
    cpu = torch.device("cpu")
    line, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    context = autocast("bf16", cpu)
    for _ in range(2):
        with context:
            assert line(x).dtype == torch.bfloat16
    with autocast("fp32", cpu):
        assert line(x).dtype == torch.float32
    assert (data_type("fp64"), data_type("bf16"), data_type("fp32")) == (torch.float64, None, None)


@pytest.mark.gpu
def test_a_cuda_device_is_made_current() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    device = open_device("cuda", Ranks())
    assert torch.cuda.current_device() == device.index
