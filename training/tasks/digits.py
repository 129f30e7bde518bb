"""Handwritten digits: 1797 real 8 x 8 images (Alpaydin and Kaynak 1998, as scikit-learn ships them) and a small MLP."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from ..errors import DataError
from ..order import Indices

Batch = tuple[Tensor, Tensor]

_HELD_OUT = 360
_SPLIT_SEED = 0


@dataclass(frozen=True)
class Images:
    """Images (samples, 64) in 0..1 and their digits (samples,)."""

    pixels: Tensor
    digits: Tensor

    def __len__(self) -> int:
        return len(self.digits)

    def fetch(self, indices: Indices) -> Batch:
        """Pixels (batch, 64) and digits (batch,)."""
        picked = torch.from_numpy(indices)
        return self.pixels.index_select(0, picked), self.digits.index_select(0, picked)


class Digits:
    """Classify digits: 64-hidden-10, 1437 images to train on and 360 held out, the same on every machine."""

    def __init__(self, hidden: int = 256, depth: int = 1, dropout: float = 0.0) -> None:
        self._hidden, self._depth, self._dropout = hidden, depth, dropout
        self._train, self._held_out = _split(_csv())

    def model(self) -> nn.Module:
        """An MLP with `depth` hidden layers of `hidden` units."""
        layers: list[nn.Module] = []
        width = 64
        for _ in range(self._depth):
            layers += [nn.Linear(width, self._hidden), nn.ReLU()]
            if self._dropout:
                layers.append(nn.Dropout(self._dropout))
            width = self._hidden
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def train_data(self) -> Images:
        return self._train

    def eval_data(self) -> Images:
        return self._held_out

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """Cross-entropy summed over the images, and their number."""
        pixels, digits = batch
        return F.cross_entropy(model(pixels), digits, reduction="sum"), len(digits)

    def eval_metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, float]]:
        """Accuracy and loss, as sums over the images."""
        pixels, digits = batch
        logits = model(pixels)
        right = (logits.argmax(1) == digits).sum()
        return {
            "accuracy": (right, len(digits)),
            "loss": (F.cross_entropy(logits, digits, reduction="sum"), len(digits)),
        }


def _csv() -> Path:
    # find_spec locates the package without importing it: scikit-learn's import would cost each rank most of a second.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("train.task: digits needs scikit-learn's data; pip install 'ddp-launcher[examples]'")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataError(f"train.task: digits: {path} is missing; pip install 'scikit-learn>=1.4'")
    return path


def _split(path: Path) -> tuple[Images, Images]:
    table = np.loadtxt(path, delimiter=",", dtype=np.float32)
    table = table[np.random.default_rng(_SPLIT_SEED).permutation(len(table))]
    pixels, digits = torch.from_numpy(table[:, :64] / 16.0), torch.from_numpy(table[:, 64].astype(np.int64))
    cut = len(table) - _HELD_OUT
    return Images(pixels[:cut], digits[:cut]), Images(pixels[cut:], digits[cut:])
