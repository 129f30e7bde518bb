"""The state of a model, an optimizer and the random generators survives a trip through named tensors and JSON bit for
bit, training goes on as if nothing had happened, and what does not fit is named."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from training.buffers import Buffers
from training.errors import CheckpointError
from training.snapshot import Snapshot, capture, capture_rng, pack, restore, restore_rng, unpack
from training.tensorfile import decode, raw_bytes


class Odd(nn.Module):
    """Tied weights, a transposed and a 0-dim parameter, one that gets no gradient, and buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.slanted = nn.Parameter(torch.randn(3, 3).t())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("narrow", torch.randn(3).bfloat16())
        self.register_buffer("wide", torch.tensor([math.nan, -0.0, 1e-310], dtype=torch.float64))
        self.register_buffer("count", torch.tensor(2**60 + 1))
        self.register_buffer("nothing", torch.empty(0, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens) @ self.slanted * self.scale)  # type: ignore[no-any-return]


def _written(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return decode(bytes(Buffers().copy({"file": tensors})["file"].content))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.01, betas=(0.8, 0.9)),
    "adam-amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: SGD(p, lr=0.01),
    "sgd-momentum": lambda p: SGD(p, lr=0.01, momentum=0.9),
}


def train(model: nn.Module, optimizer: Optimizer, steps: int, seed: int = 7) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(5, (4,), generator=generator)).square().sum().backward()
        optimizer.step()


def through_files(state: Snapshot) -> Snapshot:
    plain = json.loads(json.dumps(state.plain, allow_nan=False))
    return Snapshot(
        _written(state.model) if state.model else {},
        _written(state.optimizer),
        plain,
    )


def bits(value: Any) -> Any:
    """Something that is equal only where every tensor is equal bit for bit."""
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape), bytes(raw_bytes(value)))
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_training_goes_on_as_if_it_had_not_stopped(name: str, steps: int) -> None:
    torch.manual_seed(0)
    model = Odd()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, steps)
    state = through_files(capture(model, optimizer))
    twin = Odd()
    twin_optimizer = OPTIMIZERS[name](twin.parameters())
    train(twin, twin_optimizer, 2, seed=9)
    assert restore(state, twin, twin_optimizer) == []
    assert bits(twin.state_dict()) == bits(model.state_dict())
    assert bits(twin_optimizer.state_dict()) == bits(optimizer.state_dict())
    train(model, optimizer, 3)
    train(twin, twin_optimizer, 3)
    assert bits(twin.state_dict()) == bits(model.state_dict())


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    model = Odd()
    state = capture(model, SGD(model.parameters(), lr=0.1))
    assert state.plain["model"]["aliases"] == {"head.weight": "embed.weight"}
    assert "head.weight" not in state.model
    twin = Odd()
    restore(state, twin, SGD(twin.parameters(), lr=0.1))
    assert twin.head.weight is twin.embed.weight
    assert torch.equal(twin.head.weight, model.embed.weight)


def test_weights_tied_now_but_different_in_the_checkpoint_are_refused() -> None:
    apart = Odd()
    apart.head.weight = nn.Parameter(torch.randn(5, 3))
    state = capture(apart, SGD(apart.parameters(), lr=0.1))
    model = Odd()
    with pytest.raises(CheckpointError, match=r"head\.weight and embed\.weight: one tensor in the model"):
        restore(state, model, SGD(model.parameters(), lr=0.1))


def test_optimizer_state_in_another_precision_than_its_parameter_keeps_its_bits() -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    moment = torch.full((2, 2), 0.1)
    optimizer.state[model.weight] = {"momentum_buffer": moment}
    state = through_files(capture(model, optimizer))
    twin = nn.Linear(2, 2).bfloat16()
    twin_optimizer = SGD(twin.parameters(), lr=0.1, momentum=0.9)
    restore(state, twin, twin_optimizer)
    assert bits(twin_optimizer.state[twin.weight]["momentum_buffer"]) == bits(moment)


def test_state_finds_its_parameter_by_name_after_a_reordering() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(i + 1))
    optimizer.step()
    twin = nn.ModuleDict({"b": nn.Linear(2, 2), "a": nn.Linear(2, 2)})
    twin_optimizer = SGD(twin.parameters(), lr=0.1, momentum=0.9)
    restore(capture(model, optimizer), twin, twin_optimizer)
    for name, parameter in model.named_parameters():
        mine = twin_optimizer.state[dict(twin.named_parameters())[name]]["momentum_buffer"]
        assert torch.equal(mine, optimizer.state[parameter]["momentum_buffer"])


def test_the_spec_sets_the_options_and_a_change_is_reported_but_state_in_a_group_is_restored() -> None:
    model = nn.Linear(1, 1)
    optimizer = AdamW(model.parameters(), lr=0.5, weight_decay=0.1, betas=(0.9, 0.99))
    optimizer.param_groups[0]["k"] = 41
    now = AdamW(model.parameters(), lr=0.25, weight_decay=0.2, betas=[0.9, 0.99])  # type: ignore[arg-type]
    now.param_groups[0]["k"] = 0
    notes = restore(through_files(capture(model, optimizer)), model, now)
    assert notes == ["optimizer: weight_decay 0.1 in the checkpoint, 0.2 in the spec, which holds"]
    group = now.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["k"]) == (0.25, 0.2, 41)


def _two(first: int, second: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(first, second, dtype=dtype), "b": nn.Linear(1, 1)})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_two(3, 2), "a.weight: (2, 2) float32 in the checkpoint, (2, 3) float32 in the model"),
        (_two(2, 2, torch.float64), "a.weight: (2, 2) float32 in the checkpoint, (2, 2) float64 in the model"),
        (nn.ModuleDict({"a": nn.Linear(2, 2)}), "b.weight: not in the model"),
        (nn.ModuleDict({**_two(2, 2)._modules, "c": nn.Linear(1, 1)}), "c.bias: not in the checkpoint"),
        (nn.Sequential(*(nn.Linear(1, 1) for _ in range(9))), "(and 14 more)"),
    ],
)
def test_a_model_that_does_not_fit_is_named_and_left_as_it_was(model: nn.Module, words: str) -> None:
    saved = _two(2, 2)
    state = capture(saved, SGD(saved.parameters(), lr=0.1))
    before = bits(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        restore(state, model, SGD(model.parameters(), lr=0.1))
    assert words in str(caught.value)
    assert "Resume with the task, options and optimizer that the run began with" in str(caught.value)
    assert bits(model.state_dict()) == before


def test_another_optimizer_or_other_groups_are_refused() -> None:
    model = nn.Linear(1, 1)
    state = capture(model, AdamW(model.parameters()))
    with pytest.raises(CheckpointError, match="AdamW in the checkpoint, SGD now"):
        restore(state, model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="1 parameter groups in the checkpoint, 2 now"):
        restore(state, model, AdamW([{"params": [model.weight]}, {"params": [model.bias]}]))


def test_extra_state_of_a_module_is_kept() -> None:
    class Counting(nn.Linear):
        seen: Any = None

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    model, twin = Counting(1, 1), Counting(1, 1)
    for value in ({"n": [1, (2.5, math.inf)], "t": torch.ones(2)}, torch.tensor([3.0])):
        model.seen = value
        restore(through_files(capture(model, SGD(model.parameters(), lr=0.1))), twin, SGD(twin.parameters(), lr=0.1))
        assert bits(twin.seen) == bits(value)


def test_packing_keeps_types_and_names_what_it_cannot_keep() -> None:
    value = {"a": (1, 2.5, [None, True]), "b": -math.inf, "c": "x"}
    assert unpack(json.loads(json.dumps(pack(value, "v", {}), allow_nan=False)), {}) == value
    with pytest.raises(CheckpointError, match=r"v\.a\.1: a set cannot be stored"):
        pack({"a": [0, {1}]}, "v", {})


def test_random_states_continue_where_they_were() -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(),
            float(np.random.normal()),
            float(torch.rand(())),
            float(torch.randn(())),
        ]

    draw()
    states = json.loads(json.dumps(capture_rng()))
    expected = draw()
    draw()
    restore_rng(states)
    assert draw() == expected
