"""A user's own task: three methods for training, two more for evaluation. It imports nothing of ours."""

import math

import torch
from torch import nn


class TwoArms(torch.utils.data.Dataset):
    """Points of two interleaved spirals; the label says which."""

    def __init__(self, points: int, noise: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.label = torch.arange(points) % 2
        angle = torch.rand(points, generator=generator) * 3 * math.pi + 0.5
        turn = angle + math.pi * self.label
        self.xy = torch.stack([turn.cos(), turn.sin()], 1) * angle[:, None] / 5
        self.xy += noise * torch.randn(points, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.xy[index], self.label[index]


class Spirals:
    """Which arm does a point belong to?"""

    def __init__(self, points: int = 2000, noise: float = 0.1) -> None:
        self.points, self.noise = points, noise

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def train_data(self) -> TwoArms:
        return TwoArms(self.points, self.noise, seed=1)

    def eval_data(self) -> TwoArms:
        return TwoArms(self.points // 4, self.noise, seed=2)

    def loss(self, model: nn.Module, batch):  # type: ignore[no-untyped-def]
        """The sum of the samples' losses, and their number: exact for every split of a batch among ranks."""
        xy, label = batch
        return nn.functional.cross_entropy(model(xy), label, reduction="sum"), len(label)

    def eval_metrics(self, model: nn.Module, batch):  # type: ignore[no-untyped-def]
        xy, label = batch
        return {"accuracy": ((model(xy).argmax(1) == label).sum(), len(label))}
