"""Our writer and the safetensors library agree bit for bit, on every dtype, shape and stride."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from training.buffers import Buffers
from training.errors import CheckpointError
from training.tensorfile import _CODES, decode, raw_bytes


def written(tensors: dict[str, torch.Tensor]) -> bytes:
    return bytes(Buffers().copy({"file": tensors})["file"].content)


SHAPES = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bit pattern in any dtype, often transposed or a strided view. Booleans are 0 or 1."""
    dtype, shape = draw(st.sampled_from(list(_CODES))), draw(SHAPES)
    count = torch.Size(shape).numel() * dtype.itemsize
    content = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        content = bytes(b & 1 for b in content)
    made = torch.frombuffer(bytearray(content), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    made = made.reshape(shape)
    return made.transpose(0, -1) if made.dim() > 1 and draw(st.booleans()) else made


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=6).filter(lambda n: n != "__metadata__"), tensors(), max_size=4))
def test_any_tensors_come_back_bit_for_bit(made: dict[str, torch.Tensor]) -> None:
    read = decode(written(made))
    assert read.keys() == made.keys()
    for name, tensor in made.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert raw_bytes(read[name]) == raw_bytes(tensor)


def test_the_library_opens_the_file(tmp_path: Path) -> None:
    made = {"odd": torch.ones(3, dtype=torch.bfloat16), "wide": torch.full((), 0.1, dtype=torch.float64)}
    (tmp_path / "t.safetensors").write_bytes(written(made))
    read = load_file(tmp_path / "t.safetensors")
    assert torch.equal(read["odd"], made["odd"])
    assert read["wide"].item() == 0.1


def test_a_conjugate_view_is_stored_as_its_values() -> None:
    view = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    assert decode(written({"z": view}))["z"].tolist() == [1 - 2j]


@pytest.mark.parametrize("tensor", [torch.zeros(1, dtype=torch.complex128), torch.eye(2).to_sparse()])
def test_a_tensor_that_the_format_cannot_hold_is_named(tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match="weird: a torch"):
        written({"weird": tensor})
