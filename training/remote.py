"""A folder of files anywhere that fsspec reaches, with the methods of `storage.LocalFolder`.

This module owns fsspec: it is imported only when such a folder is opened, and every error of a foreign library leaves
here as an OSError whose text names the path and the reason.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from .bytestream import Written, digest_of, digest_of_file, pour

T = TypeVar("T")


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

    def xxh3(self, name: str) -> str:
        def digest() -> str:
            with self._files.open(self._at(name), "rb") as source:
                return digest_of_file(source.readinto)

        return self._translate(name, digest)

    def local(self, name: str) -> Path | None:
        return None

    def make(self, name: str) -> None:
        self._translate(name, lambda: self._files.makedirs(self._at(name), exist_ok=True))

    def write(self, name: str, chunks: Iterable[bytes | memoryview], exclusive: bool = False) -> Written:
        """`exclusive`: only if there is no such object yet, in one request, where the store has that."""

        def put_new() -> Written:
            content = b"".join(chunks)
            try:
                self._files.pipe_file(self._at(name), content, mode="create")
            except FileExistsError:
                raise FileExistsError(errno.EEXIST, "exists already", self.full(name)) from None
            except (NotImplementedError, TypeError, ValueError):  # a store, or its package, that has no such request
                self._files.pipe_file(self._at(name), content)
            return Written(len(content), digest_of(content))

        def put_all() -> Written:
            with self._files.open(self._at(name), "wb") as out:
                return pour(chunks, out.write)

        return self._translate(name, put_new if exclusive else put_all)

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
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:  # every store brings its own exceptions
            code = getattr(error, "errno", None)
            reason = f"{self.full(name)}: {type(error).__name__}: {error}"
            raise (OSError(code, reason) if isinstance(code, int) else OSError(reason)) from error


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
