"""A folder of files that may live on this machine, on a shared file system, or anywhere that fsspec reaches.

This module owns fsspec: it is imported only when a folder is a URL, and every error of a foreign library leaves here as
an OSError whose text names the path and the reason. Nothing here knows what the files mean.

    folder = open_folder("runs/a/checkpoints")        # or "s3://bucket/run", "memory://run", "file:///data/run"
    written = folder.write("step-1/model.safetensors", chunks)   # durable when the call returns
    folder.publish("staging", "step-1")                          # one rename on a local folder

Names are relative to the folder, with `/` between parts.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_CHUNK_BYTES = 16 * 1024 * 1024
T = TypeVar("T")


@dataclass(frozen=True)
class Written:
    """What was written to one file."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digest of the content."""


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

    def sha256(self, name: str) -> str:
        """Hexadecimal digest of a file's content, read in pieces."""
        with (self._path / name).open("rb", buffering=0) as source:
            return hashlib.file_digest(source, "sha256").hexdigest()

    def local(self, name: str) -> Path | None:
        """The file's path where it can be opened in place, None on object stores."""
        return self._path / name

    def make(self, name: str) -> None:
        """Create a folder, with its parents; it may exist already."""
        (self._path / name).mkdir(parents=True, exist_ok=True)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
        """Write a new file in pieces and make its content durable."""
        path = self._path / name
        with path.open("xb", buffering=0) as out:

            def put(piece: memoryview) -> None:
                while piece:
                    piece = piece[out.write(piece) or 0 :]

            try:
                written = _pour(chunks, put)
                os.fsync(out.fileno())
            except OSError as error:  # a failing write carries no path of its own
                raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        return written

    def flush(self, name: str) -> None:
        """Make the names inside a folder durable."""
        descriptor = os.open(self._path / name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

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


class RemoteFolder:
    """The same for a folder that fsspec opens. Object stores have no folders and no rename of one."""

    atomic = False
    """A reader must wait for a file that is written last."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._files, self._root = _filesystem(self._url)

    def full(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def names(self, name: str = "") -> list[str]:
        def look() -> list[str]:
            self._files.invalidate_cache()
            return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in self._files.ls(path, detail=False))

        path = self._at(name)
        try:
            return self._translate(name, look)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        try:
            return int(self._translate(name, lambda: self._files.info(self._at(name))["size"]))
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        return bytes(self._translate(name, lambda: self._files.cat_file(self._at(name))))

    def sha256(self, name: str) -> str:
        def digest() -> str:
            total = hashlib.sha256()
            with self._files.open(self._at(name), "rb") as source:
                while piece := source.read(_CHUNK_BYTES):
                    total.update(piece)
            return total.hexdigest()

        return self._translate(name, digest)

    def local(self, name: str) -> Path | None:
        return None

    def make(self, name: str) -> None:
        self._translate(name, lambda: self._files.makedirs(self._at(name), exist_ok=True))

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
        def put_all() -> Written:
            with self._files.open(self._at(name), "wb") as out:
                return _pour(chunks, out.write)

        return self._translate(name, put_all)

    def flush(self, name: str) -> None:
        """Nothing to do: an object is durable when its write has returned."""

    def publish(self, staged: str, final: str) -> None:
        if self.names(final):
            raise FileExistsError(errno.EEXIST, "exists already", self.full(final))
        self._translate(final, lambda: self._files.mv(self._at(staged), self._at(final), recursive=True))

    def remove(self, name: str) -> None:
        def drop() -> None:
            if self._files.exists(self._at(name)):
                self._files.rm(self._at(name), recursive=True)

        self._translate(name, drop)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _translate(self, name: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except FileNotFoundError:
            raise
        except Exception as error:  # every store brings its own exceptions
            code = getattr(error, "errno", None)
            reason = f"{self.full(name)}: {type(error).__name__}: {error}"
            raise (OSError(code, reason) if isinstance(code, int) else OSError(reason)) from error


Folder = LocalFolder | RemoteFolder


def _pour(chunks: Iterable[bytes | memoryview], put: Callable[[memoryview], Any]) -> Written:
    """Hash and write in one pass, while a piece is still in the processor's cache."""
    total, size = hashlib.sha256(), 0
    for piece in _pieces(chunks):
        total.update(piece)
        put(piece)
        size += len(piece)
    return Written(size, total.hexdigest())


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]


def _filesystem(url: str) -> tuple[Any, str]:
    import fsspec

    protocol = url.partition("://")[0]
    try:
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise OSError(f"{url}: the package for {protocol}:// is missing ({error}); pip install it") from error
    except ValueError as error:
        raise OSError(f"{url}: {error}; give a path or a URL that fsspec opens, such as s3://bucket/folder") from error
    return files, str(root).rstrip("/")
