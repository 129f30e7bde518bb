"""Named tensors in one safetensors file.

The format is plain: 8 bytes with the header's length, a JSON header with name, dtype, shape and place of each tensor,
then the raw bytes (https://huggingface.co/docs/safetensors). Reading goes through the safetensors library. Values are
kept bit for bit, NaN payloads included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Layout:
    """Where everything stands in a file of some tensors."""

    header: bytes
    """The file's beginning; a multiple of 64 bytes."""
    places: dict[str, tuple[int, int]]
    """Name -> first byte, and the one after the last, from the file's beginning on."""
    size: int
    """Bytes of the whole file."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Errors: CheckpointError naming a tensor that the format cannot hold (sparse, quantized, complex128)."""
        # Widest elements first: every tensor then starts at a multiple of its element's size.
        check_storable(tensors)
        places: dict[str, tuple[int, int]] = {}
        described: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
            tensor = tensors[name]
            start, end = end, end + tensor.numel() * tensor.element_size()
            described[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
            places[name] = start, end
        text = json.dumps(described).encode()
        text += b" " * (-(8 + len(text)) % 64)
        header = len(text).to_bytes(8, "little") + text
        places = {name: (len(header) + start, len(header) + end) for name, (start, end) in places.items()}
        return cls(header, places, len(header) + end)


def check_storable(tensors: Mapping[str, Tensor]) -> None:
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
