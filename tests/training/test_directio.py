"""Proves that a file is written byte for byte whatever the pieces, past the page cache or where that is not known."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training import directio
from training.directio import Sink


def at_a_page(content: bytes) -> memoryview:
    memory = memoryview(mmap.mmap(-1, max(1, len(content))))[: len(content)]
    memory[:] = content
    return memory


def write(path: Path, pieces: list[bytes] | list[memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    sink = Sink(descriptor)
    for piece in pieces:
        sink.put(memoryview(piece))
    os.close(descriptor)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 20_000) | st.sampled_from([4096, 8192, 16384]), max_size=8), aligned=st.booleans())
def test_any_pieces(sizes: list[int], aligned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directio, "LEAST_BYTES", 8192)
    pieces = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    write(tmp_path / "x", [at_a_page(piece) for piece in pieces] if aligned else pieces)
    assert (tmp_path / "x").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("where", ["fcntl", "write"])
def test_a_file_system_without_direct_writes(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directio, "LEAST_BYTES", 8192)
    real_fcntl, real_write, refused = fcntl.fcntl, os.write, []

    def control(descriptor: int, command: int, argument: int = 0) -> int:
        if where == "fcntl" and command == fcntl.F_SETFL and argument & os.O_DIRECT:
            refused.append(1)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(descriptor, command, argument)

    def put(descriptor: int, data: Any) -> int:
        if where == "write" and real_fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(1)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, data)

    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "write", put)
    content = os.urandom(30_000)
    write(tmp_path / "x", [at_a_page(content)])
    assert (tmp_path / "x").read_bytes() == content
    assert refused


def test_what_the_disk_says_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "x", [b"a"])
    monkeypatch.setattr(directio, "LEAST_BYTES", 8192)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "x", [at_a_page(bytes(30_000))])


def test_a_large_page_aligned_piece_goes_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directio, "LEAST_BYTES", 8192)
    real, seen = os.write, []

    def put(descriptor: int, data: Any) -> int:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        written = real(descriptor, data)
        seen.append((written, direct))
        return written

    monkeypatch.setattr(os, "write", put)
    write(tmp_path / "x", [at_a_page(bytes(30_000)), b"more"])
    assert seen == [(28672, True), (1328, False), (4, False)]
