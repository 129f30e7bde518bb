"""Byte-level language model on real text: the sources of Python's own standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from ..errors import ConfigError, DataError
from ..order import Indices

Batch = tuple[Tensor, Tensor]

_HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Windows:
    """Windows of `context` + 1 bytes that follow one another through a text; the last, partial one is left out."""

    text: npt.NDArray[np.uint8]
    context: int

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.context)

    def fetch(self, indices: Indices) -> Batch:
        """Bytes (batch, context) and the bytes that follow each of them (batch, context), as int64."""
        window = self.text[indices[:, None] * self.context + np.arange(self.context + 1)]
        tokens = torch.from_numpy(window.astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]


class Text:
    """Predict the next byte of Python source with a small transformer. Every tenth file is held out."""

    def __init__(
        self,
        context: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        max_bytes: int = 4_000_000,
        held_out_bytes: int = 100_000,
    ) -> None:
        if width % heads:
            raise ConfigError(f"train.options.width: {width} is no multiple of heads: {heads}")
        self._shape = (context, width, depth, heads)
        self.weight_per_sample = float(context)
        self._train, self._held_out = _corpus(max_bytes, held_out_bytes)

    def model(self) -> nn.Module:
        return Transformer(*self._shape)

    def train_data(self) -> Windows:
        return Windows(self._train, self._shape[0])

    def eval_data(self) -> Windows:
        return Windows(self._held_out, self._shape[0])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """Cross-entropy summed over the bytes, and their number."""
        tokens, following = batch
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum"), following.numel()

    def eval_metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, float]]:
        """Loss in nats a byte, as a sum over the bytes."""
        return {"loss": self.loss(model, batch)}


class Transformer(nn.Module):
    """Pre-norm decoder over bytes with learned positions: (batch, length) int64 -> (batch, length, 256) logits."""

    def __init__(self, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each on a normalised copy added back to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = x + self.feed(self.norm_feed(x))
        return fed


def _corpus(max_bytes: int, held_out_bytes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Training and held-out text: whole files in the order of their names, up to each limit."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = bytearray(), bytearray()
    # The top folder alone: it is the same wherever that Python version is installed; distributions cut subfolders.
    for number, path in enumerate(sorted(folder.glob("*.py"))):
        part, limit = (held_out, held_out_bytes) if number % _HELD_OUT_EVERY == 0 else (train, max_bytes)
        if len(part) < limit:
            part += path.read_bytes()
    del train[max_bytes:], held_out[held_out_bytes:]
    if not train or not held_out:
        raise DataError(f"train.task: text: {folder} holds no Python sources; install Python's standard library")
    return np.frombuffer(bytes(train), np.uint8), np.frombuffer(bytes(held_out), np.uint8)
