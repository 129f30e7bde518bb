"""What makes one process compute the same bits each time: settings, refusals, and errors in words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .errors import ConfigError, TrainingError

KEY = "train.reproducible"


def compute_the_same_each_time() -> None:
    """Settings of this process, to be made before it uses a CUDA device.

    One thread on the CPU, since a kernel's threads share out its sums; and MKL's products in a mode in which a matrix's
    place in memory has no effect on them, which it reads when it is first used (Intel, "Conditional Numerical
    Reproducibility"). Kernels of one fixed order on CUDA; an operation that has none raises RuntimeError there, see
    `explained`. cuBLAS needs fixed workspaces for it: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """
    os.environ.setdefault("MKL_CBWR", "AUTO")
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def refuse(model: nn.Module) -> None:
    """Errors: ConfigError for a part of the model whose gradient cannot be that of its micro-batch alone."""
    for name, module in model.named_modules():
        where = f"{KEY}: {f'module {name!r} of the model' if name else 'the model'} is"
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"{where} a SyncBatchNorm, whose means are taken over the ranks, so they hang on their number; "
                "take a BatchNorm, whose means are those of a micro-batch, or set it false"
            )


@contextmanager
def explained() -> Iterator[None]:
    """Errors: TrainingError where torch refused an operation for want of a deterministic kernel; others pass."""
    try:
        yield
    except RuntimeError as error:
        if "torch.use_deterministic_algorithms" not in str(error):
            raise
        what = str(error).partition(", but you set")[0].partition("\n")[0]
        raise TrainingError(f"{KEY}: true, but {what}; compute it in another way, or set it false") from error
