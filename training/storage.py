"""A folder of files that may live on this machine, on a shared file system, or anywhere that fsspec reaches.

A folder that is a URL is `remote.RemoteFolder`, which has the same methods. Nothing here knows what the files mean.

    folder = open_folder("runs/a/checkpoints")        # or "s3://bucket/run", "memory://run", "file:///data/run"
    written = folder.write("step-1/model.safetensors", chunks)   # durable when the call returns
    folder.publish("staging", "step-1")                          # one rename on a local folder

Names are relative to the folder, with `/` between parts.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from .bytestream import Written, digest_of_file, pour
from .directio import Sink
from .remote import RemoteFolder


def open_folder(place: str) -> LocalFolder | RemoteFolder:
    """Open a local path or any URL that fsspec knows. Nothing is created yet.

    Errors: OSError when the URL's protocol is unknown or its package is not installed.
    """
    if place.startswith("file://"):
        return LocalFolder(Path(place.removeprefix("file://")))
    return RemoteFolder(place) if "://" in place else LocalFolder(Path(place))


class LocalFolder:
    """A folder on a file system. Errors are OSErrors that name the path; a missing file is a FileNotFoundError."""

    atomic = True
    """`publish` is one indivisible step."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser().absolute()

    def full(self, name: str) -> str:
        """The whole path or URL of `name`, for messages."""
        return str(self._path / name)

    def names(self, name: str = "") -> list[str]:
        """Entries directly in the folder, sorted; an empty list where there is no folder."""
        try:
            return sorted(os.listdir(self._path / name))  # noqa: PTH208 - names alone are wanted
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        """Bytes of a file, None where there is none."""
        try:
            return (self._path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, name: str) -> bytes:
        """A file's whole content."""
        return (self._path / name).read_bytes()

    def xxh3(self, name: str) -> str:
        """Hexadecimal digest of a file's content, read in pieces."""
        with (self._path / name).open("rb", buffering=0) as source:
            with suppress(OSError):  # a wish: the next bytes are fetched while these are hashed, and in larger pieces
                os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return digest_of_file(source.readinto)

    def local(self, name: str) -> Path | None:
        """The file's path where it can be opened in place, None on object stores."""
        return self._path / name

    def make(self, name: str) -> None:
        """Create a folder, with its parents, and make their names durable; it may exist already."""
        path = self._path / name
        for folder in reversed([p for p in (path, *path.parents) if not p.is_dir()]):
            folder.mkdir(exist_ok=True)
            with suppress(PermissionError):  # a parent of others' may be entered, but not read
                _flush(folder.parent)

    def write(self, name: str, chunks: Iterable[bytes | memoryview], exclusive: bool = True) -> Written:
        """Write a new file in pieces and make its content durable. It is always exclusive here: there is no such file.

        Errors: FileExistsError.
        """
        path = self._path / name
        out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        sink = Sink(out)
        try:
            written = pour(chunks, sink.put)
            os.fsync(out)
        except OSError as error:  # a failing write carries no path of its own
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        finally:
            os.close(out)
        return written

    def flush(self, name: str) -> None:
        """Make the names inside a folder durable."""
        _flush(self._path / name)

    def publish(self, staged: str, final: str) -> None:
        """Give a complete folder its final name. Errors: FileExistsError where that name is taken."""
        try:
            (self._path / staged).rename(self._path / final)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, "exists already", str(self._path / final)) from error
            raise
        self.flush("")

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with everything in it. No error where there is nothing."""
        path = self._path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


Folder = LocalFolder | RemoteFolder


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(folder)) from error
    finally:
        os.close(descriptor)
