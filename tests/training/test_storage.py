"""A folder behaves the same on a file system and behind fsspec: what is written is read back, errors name the path."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from training.storage import Folder, LocalFolder, RemoteFolder, open_folder

HOME = Path(__file__).parents[2]


@pytest.fixture(params=["path", "file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    place = {"path": str(tmp_path / "a b"), "file": f"file://{tmp_path}/a b", "memory": f"memory://{uuid.uuid4()}"}
    opened = open_folder(place[request.param])
    opened.make("")
    yield opened
    opened.remove("")


def test_written_pieces_are_read_back_with_their_size_and_hash(folder: Folder) -> None:
    big = os.urandom(17 * 1024 * 1024)
    written = folder.write("x", [b"ab", memoryview(b""), memoryview(big)])
    assert written.size == 2 + len(big) == folder.size("x")
    assert written.xxh3 == xxhash.xxh3_128_hexdigest(b"ab" + big) == folder.xxh3("x")
    assert folder.read("x") == b"ab" + big


def test_names_are_sorted_and_those_of_a_missing_folder_are_none(folder: Folder) -> None:
    folder.make("d")
    for name in ("d/b", "d/a", "c"):
        folder.write(name, [b"1"])
    assert folder.names() == ["c", "d"]
    assert folder.names("d") == ["a", "b"]
    assert folder.names("nowhere") == []
    assert folder.size("nowhere/x") is None


def test_a_missing_file_is_named(folder: Folder) -> None:
    for call in (folder.read, folder.xxh3):
        with pytest.raises(FileNotFoundError, match="gone"):
            call("gone")


def test_publishing_moves_everything_and_never_onto_a_taken_name(folder: Folder) -> None:
    folder.make("staged")
    folder.write("staged/x", [b"new"])
    folder.publish("staged", "final")
    assert (folder.names("final"), folder.read("final/x"), folder.names("staged")) == (["x"], b"new", [])
    folder.make("again")
    folder.write("again/x", [b"other"])
    with pytest.raises(FileExistsError, match="final"):
        folder.publish("again", "final")
    assert folder.read("final/x") == b"new"


def test_removing_takes_the_whole_tree_and_nothing_is_no_error(folder: Folder) -> None:
    folder.make("d/e")
    folder.write("d/e/x", [b"1"])
    folder.remove("d")
    folder.remove("d")
    assert folder.names() == []


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(OSError, match="large") as caught:
            LocalFolder(tmp_path).write("large", [b"x" * 4096])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "large")


def test_errors_of_a_foreign_store_become_oserrors_with_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RemoteFolder("memory://foreign")

    def lost(path: str) -> bytes:
        raise RuntimeError("connection lost")

    monkeypatch.setattr(folder._files, "cat_file", lost)
    with pytest.raises(OSError, match="memory://foreign/x: RuntimeError: connection lost"):
        folder.read("x")


def test_an_unknown_protocol_says_what_would_be_right() -> None:
    with pytest.raises(OSError, match=r"nosuch://x: .*give a path or a URL that fsspec opens"):
        open_folder("nosuch://x")


def test_a_relative_folder_stays_where_it_was_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = open_folder("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder.make("")
    assert (tmp_path / "here").is_dir()


def test_fsspec_is_imported_for_urls_only() -> None:
    code = (
        "import sys; from training.storage import open_folder; open_folder('/tmp/x'); open_folder('file:///tmp/x');"
        "assert not {'fsspec', 'torch'} & set(sys.modules); open_folder('memory://x'); assert 'fsspec' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=HOME, check=True, timeout=60)
