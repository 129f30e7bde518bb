"""Which device a rank computes on, in which precision, and its backend for collectives."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .errors import ConfigError, DeviceError
from .ranks import Ranks


def choose(wanted: str, visible: int, ranks: Ranks) -> int | None:
    """Index of the CUDA device for a rank that sees `visible` of them; None for the CPU. A pure function.

    A rank that sees one device takes it, whatever its local rank: the scheduler gave it its own. A rank that sees
    several takes the one of its local rank.
    Errors: DeviceError with the numbers when there is none for its local rank; ConfigError when it sees none at all.
    """
    if wanted == "cpu" or (wanted == "auto" and visible == 0):
        return None
    if visible == 0:
        raise ConfigError(
            "train.device: cuda, but this rank sees no CUDA device; ask for GPUs in resources, or use cpu"
        )
    if visible == 1:
        return 0
    if ranks.local_rank >= visible:
        raise DeviceError(
            f"train.device: local rank {ranks.local_rank} of {ranks.local_world_size} on node {ranks.node_rank} has no "
            f"device: it sees {visible}; give each task a GPU (gpus_per_node >= tasks_per_node), or use device: cpu"
        )
    return ranks.local_rank


def open_device(wanted: str, ranks: Ranks) -> torch.device:
    """The rank's device, made current when it is a CUDA one. Errors: ConfigError as `choose`."""
    visible = torch.cuda.device_count() if wanted != "cpu" else 0
    index = choose(wanted, visible, ranks)
    if index is None:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """Backend of the process group for a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context that a forward pass runs in: bf16 autocast, or nothing. It can be entered again and again."""
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def data_type(precision: str) -> torch.dtype | None:
    """Type of the model's and the batches' floating tensors; None leaves them as they were made."""
    return torch.float64 if precision == "fp64" else None
