"""Host memory that copies of a state are made into, again and again: fresh memory costs five times as much to fill."""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGN = 64


class Buffers:
    """A copy of named tensors on the host. It holds one state; the next `copy` overwrites it."""

    def __init__(self) -> None:
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._views: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def reserve(self, tensors: dict[str, Tensor]) -> None:
        """Lay out, and touch, the memory for such tensors, unless the last ones had the same names, shapes and types.

        Memory is pinned where a tensor lives on a CUDA device.
        """
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        if layout == self._layout:
            return
        starts, end = {}, 0
        for name, tensor in tensors.items():
            starts[name] = end
            end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        flat = torch.empty(end, dtype=torch.uint8, pin_memory=pinned).zero_()
        self._views = {
            name: flat[starts[name] : starts[name] + tensor.numel() * tensor.element_size()]
            .view(tensor.dtype)
            .view(tensor.shape)
            for name, tensor in tensors.items()
        }
        self._layout = layout

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors as they are now; returns the host's copies, to be read after `wait`.

        On the CPU the copy is done when this returns. From a CUDA device it runs on a stream of its own: later work
        of the current stream waits for it on the device, the calling thread does not.
        """
        self.reserve(tensors)
        sources = {name: tensor.detach() for name, tensor in tensors.items()}
        if any(source.is_cuda for source in sources.values()):
            self._copy_from_device(sources)
            return self._views
        for name, source in sources.items():
            self._views[name].copy_(source)
        return self._views

    def wait(self) -> None:
        """Until the last copy has arrived. For the thread that reads it."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy_from_device(self, sources: dict[str, Tensor]) -> None:
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)  # what was started before is part of the state
        with torch.cuda.stream(side):
            for name, source in sources.items():
                self._views[name].copy_(source, non_blocking=True)
                if source.is_cuda:
                    source.record_stream(side)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        current.wait_stream(side)  # the next step changes the tensors only after they were read
