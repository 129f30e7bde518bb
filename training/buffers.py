"""Host memory that copies of a state are made into, again and again: fresh memory costs five times as much to fill.

The copies lie in it as the files that they will be: a save then writes memory as it is, and copies nothing once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .directio import PAGE
from .tensorfile import Layout

Files = Mapping[str, Mapping[str, Tensor]]
"""File name -> tensors by name."""


@dataclass(frozen=True)
class Image:
    """The whole content of a safetensors file, in memory that begins at a page."""

    content: memoryview
    tensors: dict[str, Tensor]
    """Its tensors by name: views of the content."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], pinned: bool) -> Image:
        """Room for such tensors, their values left open, and the header.

        Errors: CheckpointError naming a tensor that the format cannot hold.
        """
        layout = Layout.of(tensors)
        memory = torch.empty(layout.size + PAGE, dtype=torch.uint8, pin_memory=pinned).zero_()
        whole = memory[-memory.data_ptr() % PAGE :][: layout.size]
        content = whole.numpy().data
        content[: len(layout.header)] = layout.header
        views = {
            name: whole[slice(*layout.places[name])].view(tensor.dtype).view(tensor.shape)
            for name, tensor in tensors.items()
        }
        return cls(content, views)


class Buffers:
    """Copies of named tensors on the host. It holds one state; the next `copy` overwrites it."""

    def __init__(self) -> None:
        self._known: list[tuple[str, str, torch.Size, torch.dtype]] = []
        self._images: dict[str, Image] = {}
        self._copied: torch.cuda.Event | None = None

    def reserve(self, files: Files) -> None:
        """Lay out, and touch, the memory for such files, unless the last ones had the same names, shapes and types.

        Memory is pinned where a tensor lives on a CUDA device. Errors: those of `Image.of`.
        """
        known = [(file, name, of.shape, of.dtype) for file, tensors in files.items() for name, of in tensors.items()]
        if known == self._known and files.keys() == self._images.keys():
            return
        pinned = any(tensor.is_cuda for tensors in files.values() for tensor in tensors.values())
        self._images = {}  # the old memory goes before the new one comes
        self._images = {file: Image.of(tensors, pinned) for file, tensors in files.items()}
        self._known = known

    def copy(self, files: Files) -> dict[str, Image]:
        """Copy the tensors as they are now; returns the files' images, to be read after `wait`.

        On the CPU the copy is done when this returns. From a CUDA device it runs on a stream of its own: later work
        of the current stream waits for it on the device, the calling thread does not. Errors: those of `reserve`.
        """
        self.reserve(files)
        pairs = [
            (self._images[file].tensors[name], tensor.detach())
            for file, tensors in files.items()
            for name, tensor in tensors.items()
        ]
        if any(source.is_cuda for _, source in pairs):
            self._copy_from_device(pairs)
        else:
            for target, source in pairs:
                target.copy_(source)
        return self._images

    def wait(self) -> None:
        """Until the last copy has arrived. For the thread that reads it."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy_from_device(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)  # what was started before is part of the state
        with torch.cuda.stream(side):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                if source.is_cuda:
                    source.record_stream(side)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        current.wait_stream(side)  # the next step changes the tensors only after they were read
