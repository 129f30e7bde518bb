"""Random tensors and an MLP, for measuring: nothing to download, nothing to learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from ..order import Indices

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Tensors:
    """Features (samples, features) and classes (samples,)."""

    features: Tensor
    classes: Tensor

    def __len__(self) -> int:
        return len(self.classes)

    def fetch(self, indices: Indices) -> Batch:
        """Features (batch, features) and classes (batch,)."""
        picked = torch.from_numpy(indices)
        return self.features.index_select(0, picked), self.classes.index_select(0, picked)


class Synthetic:
    """Classify random vectors with an MLP of `depth` hidden layers of `width` units."""

    def __init__(
        self, samples: int = 4096, features: int = 784, width: int = 256, depth: int = 1, classes: int = 10
    ) -> None:
        self._sizes = [features] + [width] * depth + [classes]
        generator = torch.Generator().manual_seed(0)
        self._data = Tensors(
            torch.randn(samples, features, generator=generator),
            torch.randint(classes, (samples,), generator=generator),
        )

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for width, following in zip(self._sizes, self._sizes[1:], strict=False):
            layers += [nn.Linear(width, following), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def train_data(self) -> Tensors:
        return self._data

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """Cross-entropy summed over the samples, and their number."""
        features, classes = batch
        return F.cross_entropy(model(features), classes, reduction="sum"), len(classes)
