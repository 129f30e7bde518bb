"""Named tensors to and from one safetensors file, piece by piece: no second copy of the state is held in memory.

The format is plain: 8 bytes with the header's length, a JSON header with name, dtype, shape and place of each tensor,
then the raw bytes (https://huggingface.co/docs/safetensors). Reading goes through the safetensors library. Values are
kept bit for bit, NaN payloads included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load, load_file
from torch import Tensor

from .errors import CheckpointError

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def encode(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The file's content in pieces: the header, then the bytes of one tensor after the other.

    A tensor on an accelerator comes to the host when its turn comes. Any shape, stride and device will do.
    Errors: CheckpointError naming a tensor that the format cannot hold (sparse, quantized, complex128).
    """
    # Widest elements first: every tensor then starts at a multiple of its element's size.
    check_storable(tensors)
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield raw_bytes(tensors[name])


def check_storable(tensors: dict[str, Tensor]) -> None:
    """Errors: CheckpointError naming a tensor that the format cannot hold (sparse, quantized, complex128)."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{name}: a {tensor.layout} tensor of {tensor.dtype} cannot be stored; "
                f"dense tensors of these types can: {', '.join(str(d).removeprefix('torch.') for d in _CODES)}"
            )


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in row-major order, without a copy where it lies so on the host already."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def decode(source: Path | bytes) -> dict[str, Tensor]:
    """Read a file, or a file's bytes. Tensors of a file may be views of it: copy what must outlive it.

    Errors: OSError, and the library's SafetensorError for content that is no such file.
    """
    return load(source) if isinstance(source, bytes) else load_file(source)
