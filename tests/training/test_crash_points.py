"""Proves that no crash point of a save leaves a torn checkpoint in use: the process may end after any write, sync,
rename or unlink, and with a power cut everything may be lost that was not synced.

Three saves are recorded as the system calls that they make. Each prefix of them is replayed into a model of a disk,
from which the states that could be found after a crash are laid out as real folders; from each of them a run must
resume with a whole checkpoint, no older than the last one whose save had returned.
"""

from __future__ import annotations

import errno
import os
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from training import directio
from training.checkpoint import Checkpoints
from training.config import RunConfig, TrainConfig
from training.ranks import Ranks
from training.remote import RemoteFolder
from training.shelf import Keep
from training.storage import LocalFolder

CONFIG = RunConfig(name="run", train=TrainConfig(task="synthetic"))
Op = tuple[Any, ...]


class Run:
    """A model and an optimizer of which every value is the step that it was saved at."""

    def __init__(self, place: str, keep_last: int = 1) -> None:
        self.store = Checkpoints(place, Keep(keep_last), Ranks())
        self.model = nn.Linear(3, 3)
        self.optimizer = SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def tensors(self) -> list[torch.Tensor]:
        moments = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        return [*(p.detach() for p in self.model.parameters()), *moments]

    def save(self, step: int) -> None:
        for tensor in self.tensors():
            tensor.fill_(step)
        self.store.save(step, 10 * step, self.model, self.optimizer, CONFIG)

    def resume(self) -> int:
        """The step of the newest checkpoint, all of which was loaded; 0 for none."""
        found = self.store.newest()
        if found is None:
            return 0
        self.store.load(found, self.model, self.optimizer)
        assert {value for tensor in self.tensors() for value in tensor.unique().tolist()} == {float(found.step)}
        assert found.samples == 10 * found.step
        return found.step


class Recorder:
    """Stands in for the calls of `os` that change a disk, makes them, and writes them down."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.log: list[Op] = []
        self._root, self._paths = root, dict[int, str]()
        self._real = {
            name: getattr(os, name) for name in ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
        }
        for name in self._real:
            patch.setattr(os, name, getattr(self, name))

    def _name(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path below the root, or None for one elsewhere."""
        whole = Path(f"/proc/self/fd/{dir_fd}").readlink() / path if dir_fd is not None else Path(path)
        return str(whole.relative_to(self._root)) if whole.is_relative_to(self._root) else None

    def _note(self, kind: str, name: str | None, *more: Any) -> None:
        if name is not None:
            self.log.append((kind, name, *more))

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        name = self._name(path, dir_fd)
        self._paths[descriptor] = name or ""
        if flags & os.O_CREAT:
            self._note("create", name)
        return descriptor

    def write(self, descriptor: int, data: Any) -> int:
        written: int = self._real["write"](descriptor, data)
        if self._paths.get(descriptor):
            self._note("write", self._paths[descriptor], bytes(data)[:written])
        return written

    def fsync(self, descriptor: int) -> None:
        self._real["fsync"](descriptor)
        self._note("fsync", self._name(Path(f"/proc/self/fd/{descriptor}").readlink()))

    def rename(self, source: Any, target: Any) -> None:
        self._real["rename"](source, target)
        self._note("rename", self._name(source), self._name(target))

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        self._real["mkdir"](path, mode)
        self._note("mkdir", self._name(path))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._real["unlink"](path, dir_fd=dir_fd)
        self._note("remove", self._name(path, dir_fd))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        name = self._name(path, dir_fd)
        self._real["rmdir"](path, dir_fd=dir_fd)
        self._note("remove", name)


@dataclass
class Node:
    """A file or a folder: as the system sees it, what of it is on the disk for sure, and what may be there too."""

    folder: bool
    data: bytes = b""
    durable: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    versions: list[dict[str, Node]] = field(default_factory=lambda: [{}])
    """Of a folder: its entries at the last sync, and after each change since."""


class Disk:
    """The model: an operation is durable when the file or the folder that it changed was synced after it."""

    def __init__(self) -> None:
        self.root = Node(folder=True)

    def _at(self, name: str) -> Node:
        node = self.root
        for part in Path(name).parts:
            node = node.entries[part]
        return node

    def apply(self, op: Op) -> None:
        kind, name = op[0], op[1]
        parent, last = self._at(str(Path(name).parent)), Path(name).name
        if kind == "write":
            self._at(name).data += op[2]
            return
        if kind == "fsync":
            node = self._at(name)
            node.durable, node.versions = node.data, [dict(node.entries)]
            return
        if kind in ("create", "mkdir"):
            parent.entries[last] = Node(folder=kind == "mkdir")
        elif kind == "remove":
            del parent.entries[last]
        elif kind == "rename":
            node = parent.entries.pop(last)
            other = self._at(str(Path(op[2]).parent))
            assert other is parent, "the model knows renames inside one folder only"
            parent.entries[Path(op[2]).name] = node
        parent.versions.append(dict(parent.entries))


def lay_out(
    node: Node, target: Path, entries: Callable[[Node], dict[str, Node]], data: Callable[[Node], bytes]
) -> None:
    """Make a real folder of one of the states that a crash could leave."""
    if not node.folder:
        target.write_bytes(data(node))
        return
    target.mkdir()
    for name, child in entries(node).items():
        lay_out(child, target / name, entries, data)


def crash_states(root: Node, chance: random.Random) -> Iterator[tuple[str, Any, Any]]:
    yield "killed", lambda n: n.entries, lambda n: n.data
    yield "power cut, nothing unsynced survived", lambda n: n.versions[0], lambda n: n.durable
    yield "power cut, names survived, data did not", lambda n: n.entries, lambda n: n.durable
    yield "power cut, data survived, names did not", lambda n: n.versions[0], lambda n: n.data
    for _ in range(2):
        seed = chance.random()

        def some(node: Node, seed: float = seed) -> dict[str, Node]:
            return random.Random(f"{seed}{sorted(node.entries)}").choice(node.versions)

        def part(node: Node, seed: float = seed) -> bytes:
            cut = random.Random(f"{seed}{len(node.data)}").randint(len(node.durable), len(node.data))
            return node.data[:cut] + bytes(random.Random(seed).choice((0, len(node.data) - cut)))  # short, or zeros

        yield "power cut, some of it survived", some, part


@pytest.mark.parametrize("block", [directio.PAGE, 512])
def test_every_crash_point_of_three_saves(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directio, "PAGE", block)
    monkeypatch.setattr(directio, "LEAST_BYTES", block)
    home = tmp_path / "disk"
    home.mkdir()
    run = Run(str(home / "run" / "checkpoints"))
    returned: list[tuple[int, int]] = [(0, 0)]
    with monkeypatch.context() as patch:
        recorder = Recorder(patch, home)
        for step in (1, 2, 3):
            run.save(step)
            returned.append((len(recorder.log), step))
    kinds = {op[0] for op in recorder.log}
    assert kinds == {"mkdir", "create", "write", "fsync", "rename", "remove"}, kinds
    chance, seen, checked = random.Random(1), set[int](), 0
    for end in range(len(recorder.log) + 1):
        disk = Disk()
        for op in recorder.log[:end]:
            disk.apply(op)
        promised = max(step for length, step in returned if length <= end)
        for words, entries, data in crash_states(disk.root, chance):
            place = tmp_path / f"state-{checked}"
            lay_out(disk.root, place, entries, data)
            found = Run(str(place / "run" / "checkpoints")).resume()
            assert promised <= found <= promised + 1, f"after {end} calls, {words}: {promised} was saved, {found} found"
            seen.add(found)
            checked += 1
    assert seen == {0, 1, 2, 3}
    assert checked == 6 * (len(recorder.log) + 1) > 300


def test_what_a_crash_left_is_cleaned_up_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(str(tmp_path))
    run.save(1)

    class Crash(BaseException):
        pass

    def crash(self: LocalFolder, staged: str, final: str) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "publish", crash)
        patch.setattr("threading.excepthook", lambda _: None)
        run.store.begin(2, 20, run.model, run.optimizer, CONFIG)
        run.store.settle(10)
    assert len(list(tmp_path.iterdir())) == 2
    again = Run(str(tmp_path))
    assert again.resume() == 1
    again.save(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002"]


def test_an_object_store_may_fail_at_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RemoteFolder._translate
    limit, asked = [10**9], [0]

    def counted(self: RemoteFolder, name: str, work: Callable[[], Any]) -> Any:
        asked[0] += 1
        if asked[0] > limit[0]:
            raise OSError(errno.EIO, f"{name}: the store is gone")
        return real(self, name, work)

    monkeypatch.setattr(RemoteFolder, "_translate", counted)
    found = []
    for end in range(1, 200):
        url = f"memory://{uuid.uuid4()}/c"
        run = Run(url)
        limit[0] = 10**9
        run.save(1)
        asked[0], limit[0] = 0, end
        run.store.begin(2, 20, run.model, run.optimizer, CONFIG)
        run.store.settle(10)
        *_, saved = run.store.poll()
        limit[0] = 10**9
        for tensor in run.tensors():
            tensor.fill_(1)
        found.append(_remote_step(url))
        if saved.error is None and asked[0] <= end:
            break
    assert set(found) == {1, 2}
    assert found == sorted(found)
    assert len(found) > 15


def _remote_step(url: str) -> int:
    found = Run(url).store.newest()
    assert found is not None
    return found.step
