"""Writing one checkpoint, by all ranks together, while training goes on: what runs on each rank's writer thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from torch import distributed as dist

from . import manifest
from .agree import together
from .buffers import Buffers, Image
from .bytestream import Written
from .config import RunConfig, to_plain
from .errors import CheckpointError, NotFinite, Superseded, TrainingError
from .finite import Watched
from .ledger import Ledger
from .ranks import Ranks
from .shelf import Shelf, say
from .snapshot import Snapshot
from .storage import Folder

T = TypeVar("T")


class _Share(NamedTuple):
    """What a rank tells the others of its part of a save."""

    step: int
    samples: int
    files: dict[str, Written]
    ledger: dict[str, Any]
    spoiled: tuple[str, float, str] | None = None
    """Name, value and host of an element that may not be kept."""


@dataclass(frozen=True)
class Copied:
    """A rank's share of the state."""

    images: dict[str, Image]
    """File name -> content: copies on the host, which nothing changes until the save has ended."""
    texts: dict[str, bytes]
    """File name -> content."""
    watched: Watched
    """What must be finite in it."""


@dataclass(frozen=True)
class Content:
    """What a checkpoint says: on each rank the rank's own share of it."""

    step: int
    samples: int
    copied: Copied
    config: RunConfig | None
    ledger: dict[str, Any]
    extra: dict[str, Any]


@dataclass
class Saved:
    """How a save went, as this rank saw it."""

    step: int
    samples: int
    stall_s: float
    """Seconds that training stood still for it: for the save before it, and for the copy."""
    write_s: float = 0.0
    """Seconds from the copy to the end, training going on."""
    bytes: int = 0
    """Bytes that this rank wrote."""
    tries: int = 0
    error: CheckpointError | NotFinite | Superseded | None = None
    """Why there is no such checkpoint; None when there is."""

    @property
    def final(self) -> bool:
        """No later save mends it: the state is spoiled, or this attempt may write nothing more."""
        return isinstance(self.error, NotFinite | Superseded)


@dataclass
class Writer:
    """Writes contents to a folder. Every method is called by all ranks at the same point."""

    folder: Folder
    shelf: Shelf
    ranks: Ranks
    buffers: Buffers
    pauses_s: tuple[float, ...] = ()
    """How long to wait before each further try of a write that failed."""
    newer: Callable[[], int | None] = lambda: None
    """The number of a newer attempt of the run, which keeps this one from publishing anything."""
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    """The ranks' process group for saves; None: the default one."""

    def run(self, content: Content | CheckpointError, saved: Saved) -> None:
        """Write and publish, with further tries, and note in `saved` how it went. Raises nothing."""
        began = time.perf_counter()
        try:
            for pause in (*self.pauses_s, None):
                saved.tries += 1
                try:
                    self._write(content, saved)
                    break
                except CheckpointError as error:
                    if pause is None or isinstance(content, CheckpointError):
                        raise
                    if self.ranks.rank == 0:
                        say(f"{error}; the next try is in {pause:g} s")
                    time.sleep(pause)
        except (CheckpointError, NotFinite, Superseded) as error:
            saved.error = error
        except Exception as error:  # noqa: BLE001 - the thread has nobody above it; it is raised where the save is ended
            saved.error = CheckpointError(
                f"the checkpoint of step {saved.step} was not written: {type(error).__name__}: {error}"
            )
        saved.write_s = time.perf_counter() - began

    def _write(self, content: Content | CheckpointError, saved: Saved) -> None:
        failed = f"the checkpoint of step {saved.step} was not written, older ones are intact"
        place = self._alone(failed, lambda: self.shelf.prepare(saved.step, saved.samples))
        if place is None:
            return
        try:
            shares = self._together(failed, lambda: self._write_share(place, content), everyone=True)
            _refuse_mixed(shares)
            self._refuse_spoiled(saved.step, [share.spoiled for share in shares])
            files = {name: written for share in shares for name, written in share.files.items()}
            ledgers = [share.ledger for share in shares]
            self._alone(failed, lambda: self._publish(place, content, files, ledgers))
        except TrainingError:
            if self.ranks.rank == 0:
                self.shelf.drop(place)
            raise
        saved.bytes = sum(written.size for written in shares[self.ranks.rank].files.values())
        if self.ranks.rank == 0:
            self.shelf.retire(saved.step)

    def _refuse_spoiled(self, step: int, found: list[tuple[str, float, str] | None]) -> None:
        for rank, spoiled in enumerate(found):
            if spoiled is not None:
                name, value, host = spoiled
                raise NotFinite(step, rank, value, host, f"an element of {name}")

    def _write_share(self, place: str, content: Content | CheckpointError) -> _Share:
        """Write this rank's files, unless its share is spoiled."""
        if isinstance(content, CheckpointError):
            raise content
        self.folder.make(place)  # asks the server, where this node's view of a shared folder may be old
        self.buffers.wait()
        if spoiled := content.copied.watched.spoiled():
            return _Share(content.step, content.samples, {}, {}, (*spoiled, socket.gethostname()))
        files = {name: self.folder.write(f"{place}/{name}", [text]) for name, text in content.copied.texts.items()}
        for name, image in content.copied.images.items():
            files[name] = self.folder.write(f"{place}/{name}", [image.content])
        return _Share(content.step, content.samples, files, content.ledger)

    def _refuse_unseen(self, place: str, files: dict[str, Written]) -> None:
        """Errors: CheckpointError where rank 0 does not see a rank's file: the ranks do not share the folder."""
        there = set(self.folder.names(place))
        for name, written in files.items():
            if name not in there or self.folder.size(f"{place}/{name}") != written.size:
                raise CheckpointError(
                    f"{self.folder.full(name)}: rank 0 does not see what another rank wrote; the folder of checkpoints "
                    "must be one that all ranks share"
                )

    def _publish(
        self, place: str, content: Content | CheckpointError, files: dict[str, Written], ledgers: list[dict[str, Any]]
    ) -> None:
        assert isinstance(content, Content)
        self._refuse_unseen(place, files)
        described = manifest.describe(
            content.step,
            content.samples,
            self.ranks.world_size,
            files,
            {} if content.config is None else to_plain(content.config),
            _total(content.step, content.samples, ledgers),
            content.extra,
        )
        self.shelf.publish(place, content.step, content.samples, described)

    def _alone(self, failed: str, work: Callable[[], T]) -> T:
        """What rank 0 makes of `work`. Errors: Superseded, on all ranks, without work where a newer attempt began."""

        def unless_superseded() -> tuple[int | None, T | None]:
            newer = self.newer()
            return newer, work() if newer is None else None

        newer, result = self._together(failed, unless_superseded)[0]
        if newer is not None:
            raise Superseded(newer)
        return cast(T, result)

    def _together(self, failed: str, work: Callable[[], T], everyone: bool = False) -> list[T]:
        return together(self.ranks, failed, work, everyone, self.group)


def _refuse_mixed(shares: list[_Share]) -> None:
    """Errors: CheckpointError, on all ranks alike, when their parts are of different saves."""
    steps = [share.step for share in shares]
    if len({(share.step, share.samples) for share in shares}) > 1:
        raise CheckpointError(f"the ranks are not at the same save: they are at those of steps {steps}")


def _total(step: int, samples: int, ledgers: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' parts of the ledger in one; empty where there are none.

    Errors: CheckpointError when it does not hold the samples that the run has consumed.
    """
    whole = Ledger.total(ledgers) if all(ledgers) else {}
    if whole and whole["since"]["samples"] + whole["samples"] != samples:
        counted = f"{whole['samples']} samples since {whole['since']['samples']}"
        raise CheckpointError(f"step {step}: the ledger has {counted}, the run has seen {samples}")
    return whole


def shares(snapshot: Snapshot, alike: set[str], world_size: int) -> list[Snapshot]:
    """Split a state that all ranks have into a share for each, about equal in bytes; the plain part is rank 0's.

    `alike`: names of the model's tensors that are the same on all ranks, as parameters are. The others, such as the
    running means of a batch norm, are taken from rank 0, as DDP does. The split is the same on every rank.
    """
    found = [Snapshot({}, {}, snapshot.plain if rank == 0 else {}) for rank in range(world_size)]
    sizes = [0] * world_size
    entries = [("model", name, tensor) for name, tensor in snapshot.model.items()]
    entries += [("optimizer", name, tensor) for name, tensor in snapshot.optimizer.items()]
    for kind, name, tensor in sorted(entries, key=lambda entry: -entry[2].numel() * entry[2].element_size()):
        shared = kind == "optimizer" or name in alike
        rank = sizes.index(min(sizes)) if shared else 0
        (found[rank].model if kind == "model" else found[rank].optimizer)[name] = tensor
        sizes[rank] += tensor.numel() * tensor.element_size()
    return found
