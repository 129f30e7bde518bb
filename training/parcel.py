"""A batch in memory that two processes share: the bytes of its tensors and arrays, then the rest of it, pickled."""

from __future__ import annotations

import io
import mmap
import os
import pickle
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 64
_Bytes = npt.NDArray[np.uint8]


class Parcel(NamedTuple):
    """How a slot is used."""

    size: int
    """Bytes of tensors and arrays, from the start."""
    rest: int
    """Bytes after them: the batch, pickled, with references in place of tensors and arrays."""


class Slot:
    """Memory for one batch, shared with processes that are forked later. It has no name, and grows as needed."""

    def __init__(self) -> None:
        self._file = os.memfd_create("batch")
        self._bytes: _Bytes = np.empty(0, np.uint8)

    def view(self, size: int) -> _Bytes:
        """The first `size` bytes. What they held stays when the slot grows; it never shrinks."""
        if size > len(self._bytes):
            wanted = -(-size * 5 // 4 // mmap.PAGESIZE) * mmap.PAGESIZE
            length = max(os.fstat(self._file).st_size, wanted)  # the other process may have made it larger already
            os.ftruncate(self._file, length)
            self._bytes = np.frombuffer(mmap.mmap(self._file, length), np.uint8)
        return self._bytes[:size]

    def close(self) -> None:
        """Give the memory back, once no view of it is left."""
        os.close(self._file)
        self._bytes = np.empty(0, np.uint8)


def pack(batch: Any, slot: Slot) -> Parcel:
    """Put a batch into a slot."""
    packer = _Packer()
    rest = packer.describe(batch)
    memory = slot.view(packer.size + len(rest))
    for start, data in packer.parts:
        memory[start : start + len(data)] = data
    memory[packer.size :] = np.frombuffer(rest, np.uint8)
    return Parcel(packer.size, len(rest))


def unpack(parcel: Parcel, slot: Slot, pinned: bool) -> Any:
    """The batch, in memory of its own: the slot may be used anew. `pinned`: that memory is page-locked.

    Its tensors and arrays are parts of one block, which lives as long as any of them.
    """
    memory = slot.view(parcel.size + parcel.rest)
    block = torch.empty(parcel.size, dtype=torch.uint8, pin_memory=pinned)
    block.numpy()[:] = memory[: parcel.size]
    return _Unpacker(memory[parcel.size :].tobytes(), block).load()


class _Packer(pickle.Pickler):
    """Pickles references (is_tensor, start, length, type, shape) instead of dense CPU tensors and plain arrays."""

    def __init__(self) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=5)
        self.parts: list[tuple[int, _Bytes]] = []
        self.size = 0

    def describe(self, batch: Any) -> bytes:
        self.dump(batch)
        return self._stream.getvalue()

    def persistent_id(self, thing: Any) -> Any:
        if type(thing) is torch.Tensor:
            if thing.layout is not torch.strided or thing.device.type != "cpu" or thing.is_quantized:
                return None
            flat = thing.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            return (True, *self._add(flat.view(torch.uint8).numpy()), thing.dtype, tuple(thing.shape))
        if type(thing) in (np.ndarray, np.memmap) and not thing.dtype.hasobject:
            plain = np.ascontiguousarray(thing).reshape(-1)
            return (False, *self._add(plain.view(np.uint8)), thing.dtype, thing.shape)
        return None

    def _add(self, data: _Bytes) -> tuple[int, int]:
        start = self.size
        self.parts.append((start, data))
        self.size = -(-(start + len(data)) // _ALIGN) * _ALIGN
        return start, len(data)


class _Unpacker(pickle.Unpickler):
    def __init__(self, rest: bytes, block: torch.Tensor) -> None:
        super().__init__(io.BytesIO(rest))
        self._block = block

    def persistent_load(self, reference: Any) -> Any:
        is_tensor, start, length, dtype, shape = reference
        part = self._block[start : start + length]
        return part.view(dtype).reshape(shape) if is_tensor else part.numpy().view(dtype).reshape(shape)
