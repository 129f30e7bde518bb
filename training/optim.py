"""Optimizers built from the spec, and the one place where a learning rate is set."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .config import OptimConfig
from .errors import ConfigError


def build(
    config: OptimConfig, parameters: Iterable[nn.Parameter], lr: float, unused_allowed: bool = False
) -> torch.optim.Optimizer:
    """AdamW, Adam or SGD over the parameters that need a gradient.

    The fused kernels of torch are used: one pass over each tensor, on the CPU too, where they take half the time of
    the default. Not by SGD where a parameter may get its first gradient later than others (`unused_allowed`): its
    fused kernel then lacks a momentum. Errors: ValueError from torch for settings out of range.
    """
    wanted = [p for p in parameters if p.requires_grad]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in wanted)
    if config.name == "sgd":
        return torch.optim.SGD(
            wanted,
            lr=lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            fused=fused and not (unused_allowed and config.momentum),
        )
    first, second = config.betas
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(wanted, lr=lr, betas=(first, second), eps=config.eps, weight_decay=config.weight_decay, fused=fused)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def refuse_sparse(model: nn.Module) -> None:
    """Errors: ConfigError for a module whose gradients no optimizer here takes."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"train.task: {f'module {name!r} of the model' if name else 'the model'} is an "
                f"{type(module).__name__} with sparse gradients, which none of the optimizers takes; "
                "give it sparse=False"
            )
