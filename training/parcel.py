"""Batches in memory that two processes share: the bytes of their tensors and arrays, then the rest, pickled."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 64
_Bytes = npt.NDArray[np.uint8]
How = Literal["view", "copy", "pin"]


class Parcel(NamedTuple):
    """How a slot is used."""

    size: int
    """Bytes of tensors and arrays, from the start."""
    rests: list[int]
    """Bytes that follow, of each batch: the batch, pickled, with references in place of tensors and arrays."""


class Slot:
    """Memory for batches, shared with processes that are forked later. It has no name, and grows as needed."""

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


def pack(batches: Iterable[Any], slot: Slot) -> Parcel:
    """Put batches into a slot, each before the next one is made: memory just freed is faster than fresh memory."""
    packer = _Packer(slot)
    rests = [packer.put(batch) for batch in batches]
    memory = slot.view(packer.size + sum(map(len, rests)))
    memory[packer.size :] = np.frombuffer(b"".join(rests), np.uint8)
    return Parcel(packer.size, [len(rest) for rest in rests])


def unpack(parcel: Parcel, slot: Slot, how: How, done: Callable[[], None]) -> list[Any]:
    """The batches again. Their tensors and arrays are parts of one block, which lives as long as any of them.

    `how`: `view` leaves the block in the slot; `copy` makes one of ordinary memory, `pin` one of page-locked memory.
    `done` is called when the slot may be used anew.
    """
    memory = slot.view(parcel.size + sum(parcel.rests))
    stream = io.BytesIO(memory[parcel.size :].tobytes())
    rests = [stream.read(length) for length in parcel.rests]
    if how == "view":
        kept = memory[: parcel.size].view(_Block)
        weakref.finalize(kept, done).atexit = False
        block = torch.from_numpy(np.asarray(kept[:]))  # of `kept` itself it would have the base of `kept` for its own
    else:
        block = torch.empty(parcel.size, dtype=torch.uint8, pin_memory=how == "pin")
        block.numpy()[:] = memory[: parcel.size]
        done()
    return [_Unpacker(rest, block).load() for rest in rests]


class _Block(np.ndarray[Any, Any]):
    """Part of a slot, which others refer to. Of a type of its own: numpy lets a view of a view refer to the first
    array of the same type, and so not to the part."""


class _Packer(pickle.Pickler):
    """Pickles references (is_tensor, start, length, type, shape) instead of dense CPU tensors and plain arrays."""

    def __init__(self, slot: Slot) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=5)
        self._slot = slot
        self.size = 0

    def put(self, batch: Any) -> bytes:
        self._stream.seek(0)
        self._stream.truncate()
        self.clear_memo()
        self.dump(batch)
        return self._stream.getvalue()

    def persistent_id(self, thing: Any) -> Any:
        kind = type(thing)
        if kind is torch.Tensor:
            if thing.layout is not torch.strided or thing.device.type != "cpu" or thing.is_quantized:
                return None
            return (True, *self._copy(_bytes_of(thing)), _NUMBERS[thing.dtype], tuple(thing.shape))
        if (kind is np.ndarray or kind is np.memmap) and not thing.dtype.hasobject:
            return (False, *self._copy(thing), thing.dtype, thing.shape)
        return None

    def _copy(self, array: npt.NDArray[Any]) -> tuple[int, int]:
        start, length = self.size, array.nbytes
        if length:
            target = self._slot.view(start + length)[start:]
            np.copyto(target.view(array.dtype).reshape(array.shape), array)
        self.size = -(-(start + length) // _ALIGN) * _ALIGN
        return start, length


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):  # it requires a gradient, is a conjugate, or of a type that numpy has not
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy()


class _Unpacker(pickle.Unpickler):
    def __init__(self, rest: bytes, block: torch.Tensor) -> None:
        super().__init__(io.BytesIO(rest))
        self._block = block

    def persistent_load(self, reference: Any) -> Any:
        is_tensor, start, length, dtype, shape = reference
        if is_tensor:
            if not length:
                return torch.empty(shape, dtype=_DTYPES[dtype])
            return self._block[start : start + length].view(_DTYPES[dtype]).view(shape)
        return self._block[start : start + length].numpy().view(dtype).reshape(shape)


_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
"""torch's types by number: pickled, their names would take longer than all else of a reference."""
