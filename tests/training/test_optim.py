"""Proves that the optimizers get every setting of the spec and step as torch's own plain ones do.

pytest tests/training/test_optim.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from training.config import OptimConfig
from training.errors import ConfigError
from training.optim import build, refuse_sparse, set_lr

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
CASES: list[tuple[OptimConfig, Make]] = [
    (
        OptimConfig(name="adamw", betas=[0.8, 0.9], eps=1e-5, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.1, foreach=False),
    ),
    (
        OptimConfig(name="adam", weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, foreach=False),
    ),
    (
        OptimConfig(name="sgd", momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False),
    ),
]


@pytest.mark.parametrize(("config", "plain"), CASES, ids=[case[0].name for case in CASES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_like_the_plain_optimizer(config: OptimConfig, plain: Make, dtype: torch.dtype) -> None:
    start = torch.linspace(-1, 1, 12, dtype=dtype).reshape(3, 4)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = build(config, [ours], lr=0.1), plain([theirs])
    for number in range(5):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = torch.sin(start * (number + 1))
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=0.0)


def test_frozen_parameters_are_left_out_and_the_rate_is_set_everywhere() -> None:
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer: Any = build(OptimConfig(), [frozen, torch.nn.Parameter(torch.ones(3))], lr=0.1)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]


@pytest.mark.parametrize("config", [case[0] for case in CASES], ids=[case[0].name for case in CASES])
def test_a_parameter_may_get_its_first_gradient_later_than_others(config: OptimConfig) -> None:
    early, late = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = build(config, [early, late], lr=0.1, unused_allowed=True)
    for gradient in (None, torch.ones(3), None, torch.ones(3)):
        early.grad, late.grad = torch.ones(3), gradient
        optimizer.step()
    assert bool((late < 1.0).all()) and bool((early < late).all())


@pytest.mark.parametrize(("kind", "what"), [(torch.nn.Embedding, "Embedding"), (torch.nn.EmbeddingBag, "EmbeddingBag")])
def test_sparse_gradients_are_refused_by_the_name_of_their_module(kind: Any, what: str) -> None:
    refuse_sparse(torch.nn.Sequential(kind(3, 2)))
    said = f"train.task: module '1' of the model is an {what} with sparse gradients, .*; give it sparse=False"
    with pytest.raises(ConfigError, match=said):
        refuse_sparse(torch.nn.Sequential(kind(3, 2), kind(3, 2, sparse=True)))
