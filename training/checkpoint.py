"""Checkpoints: copied at once, written aside behind training, published last, verified before use.

    checkpoints/step-000001200/
      model-00000.safetensors      parameters and buffers: rank 0's share; each rank writes one
      optimizer-00000.safetensors  tensors of the optimizer, likewise
      state.json                   the rest of the optimizer, and names of shared tensors
      rng-00000.json               random states of each rank, written by that rank
      manifest.json                written last: step, samples, versions, and size and XXH3 hash of each file

A reader trusts nothing without a valid manifest, and collects the tensors of all files that it lists. On a file system
a checkpoint is built in a hidden folder and renamed; on an object store its manifest is what publishes it. Nothing is
ever pickled. Every rank takes part in every call.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .agree import reason, together
from .buffers import Buffers, Files
from .config import RunConfig
from .errors import CheckpointError, ConfigError
from .finite import Watched
from .manifest import Found
from .ranks import Ranks
from .reading import read, verified
from .saving import Content, Copied, Saved, Writer, shares
from .shelf import Keep, Shelf, say
from .snapshot import Snapshot, capture, capture_rng, restore, restore_rng
from .storage import open_folder

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one run in one folder, a local path or any URL that fsspec opens.

    Each method but `poll` and `settle` must be called by all ranks at the same point, after torch.distributed is
    initialised where there are several. What fails on one rank is raised on all of them.
    """

    def __init__(
        self,
        folder: str,
        keep: Keep,
        ranks: Ranks,
        pauses_s: tuple[float, ...] = (),
        strict: bool = False,
        newer: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`pauses_s`: how long to wait before each further try of a write that failed. `strict`: `begin` raises what
        was wrong with the save before it. `newer`: the number of a newer attempt, once there is one, asked on rank 0:
        nothing is published from then on.

        Errors: CheckpointError when keep.last is below 1 or the URL cannot be opened.
        """
        if keep.last < 1:
            raise CheckpointError(f"train.checkpoint.keep_last: {keep.last}: at least 1 is kept; give 1 or more")
        try:
            self._folder = open_folder(folder)
        except OSError as error:
            raise CheckpointError(f"train.checkpoint.folder: {error}") from error
        self._ranks, self._strict = ranks, strict
        self._shelf = Shelf(self._folder, keep)
        self._buffers = Buffers()
        self.writer = Writer(self._folder, self._shelf, ranks, self._buffers, pauses_s, newer)
        self._thread: threading.Thread | None = None
        self._under_way: Saved | None = None
        self._ended: list[Saved] = []
        self._last: Saved | None = None

    def claim(self, run: str) -> None:
        """Make the folder that run's own, where it lies outside of the run's folder.

        Errors: ConfigError when it is another run's, whose checkpoints this one would go on from, or spoil.
        """
        owner = self._together("the folder of checkpoints cannot be used", lambda: self._shelf.claim(run))[0]
        if owner != run:
            raise ConfigError(
                f"train.checkpoint.folder: {self._folder.full('')} holds the checkpoints of the run {owner}; give this "
                f"run a folder of its own, go on with the other by launch resume {owner}, or begin with its weights by "
                f"train.init_from"
            )

    def newest(self, wanted: Callable[[int], bool] | None = None) -> Found | None:
        """The newest complete checkpoint, of those whose step is wanted; the same one on every rank, or None.

        Rank 0 verifies sizes and hashes. A damaged checkpoint is named on standard error, set aside as step-....bad,
        and the next older one is tried. Errors: CheckpointError when storage cannot be read, which says nothing about
        a checkpoint's content.
        """
        return self._together("no checkpoint was read", lambda: self._shelf.newest(wanted))[0]

    def load(self, found: Found, model: nn.Module, optimizer: Optimizer) -> None:
        """Restore the model and the optimizer, and this rank's random states if the world size is the same.

        Errors: CheckpointError when the state does not fit, naming each tensor with both shapes, or when a file
        changed since it was verified.
        """

        def work() -> None:
            notes = restore(read(self._folder, found), model, optimizer)
            if found.world_size == self._ranks.world_size:
                restore_rng(json.loads(verified(self._folder, found, _rng(self._ranks.rank))))
            for note in notes if self._ranks.rank == 0 else []:
                say(f"{self._folder.full(found.name)}: {note}")

        self._together(f"{self._folder.full(found.name)} was not loaded", work, everyone=True)

    @property
    def aside(self) -> dict[str, str]:
        """On rank 0: checkpoints that were set aside, by the name that they have now, and why."""
        return dict(self._shelf.aside)

    def score(self, step: int, value: float) -> None:
        """Tell how good the model is at a step, the higher the better, for Keep.best. NaN is no score."""
        if not math.isnan(value):
            self._shelf.scores[step] = value

    def reserve(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make room for copies ahead of the first save, in the background."""
        if self._thread is None:
            files = self._files(self._share(model, optimizer))
            self._thread = threading.Thread(target=self._reserve, args=(files,), daemon=True)
            self._thread.start()

    def begin(
        self,
        step: int,
        samples: int,
        model: nn.Module,
        optimizer: Optimizer,
        config: RunConfig | None = None,
        ledger: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Copy the state of the bare `model` after `step` optimizer steps and `samples` samples, and start to write.

        It waits for the save before it, if that is still under way. `config` is for the record, `ledger` this rank's
        part of the ledger, `extra` further state of the loop, alike on all ranks; both JSON. How it went: `poll`.
        Errors: NotFinite when the state of the save before was spoiled, Superseded when a newer attempt had begun; with
        `strict`, whatever was wrong.
        """
        began = time.perf_counter()
        self._wait()
        if self._last is not None and (self._strict or self._last.final):
            self.finish()
        if self._ranks.world_size > 1 and self.writer.group is None:
            self.writer.group = dist.new_group(backend="gloo")  # its collectives run beside those of the steps
        content: Content | CheckpointError
        try:
            content = Content(step, samples, self._copied(model, optimizer), config, ledger or {}, extra or {})
        except Exception as error:  # noqa: BLE001 - raised on all ranks, by the writers, which expect each other
            content = CheckpointError(reason(error))
        self._under_way = saved = Saved(step, samples, time.perf_counter() - began)
        self._thread = threading.Thread(target=self.writer.run, args=(content, saved), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the save that is under way. When it returns, that checkpoint is durable and old ones are gone.

        Errors: CheckpointError naming path and reason, NotFinite when the state was spoiled, Superseded when a newer
        attempt has begun; older checkpoints are intact then.
        """
        self._wait()
        if self._last is not None and self._last.error is not None:
            raise self._last.error

    def settle(self, seconds: float) -> None:
        """After an error in training: let a save that is under way come to its end, for so long. Raises nothing."""
        if self._thread is not None:
            self._thread.join(seconds)

    def poll(self) -> list[Saved]:
        """The saves that ended since the last call, on this rank."""
        if self._under_way is not None and self._thread is not None and not self._thread.is_alive():
            self._wait()
        ended, self._ended = self._ended, []
        return ended

    def save(
        self, step: int, samples: int, model: nn.Module, optimizer: Optimizer, config: RunConfig | None = None
    ) -> None:
        """`begin` and `finish`. A good checkpoint of the same step and samples is left as it is."""
        self.begin(step, samples, model, optimizer, config)
        self.finish()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._under_way is not None:
            self._ended.append(self._under_way)
            self._last = self._under_way
            self._under_way = None

    def _share(self, model: nn.Module, optimizer: Optimizer) -> Snapshot:
        alike = {name for name, _ in model.named_parameters()}
        return shares(capture(model, optimizer), alike, self._ranks.world_size)[self._ranks.rank]

    def _files(self, share: Snapshot) -> Files:
        parts = (("model", share.model), ("optimizer", share.optimizer))
        rank = self._ranks.rank
        return {f"{kind}-{rank:05d}.safetensors": part for kind, part in parts if part or rank == 0}

    def _reserve(self, files: Files) -> None:
        with suppress(CheckpointError):  # `begin` will say it
            self._buffers.reserve(files)

    def _copied(self, model: nn.Module, optimizer: Optimizer) -> Copied:
        rank = self._ranks.rank
        share = self._share(model, optimizer)
        images = self._buffers.copy(self._files(share))
        texts = {_rng(rank): json.dumps(capture_rng()).encode()}
        if rank == 0:
            texts["state.json"] = json.dumps(share.plain, indent=1).encode()
        trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        copies = {file.partition("-")[0]: image.tensors for file, image in images.items()}
        watched = Watched(
            {name: copies["model"][name] for name in share.model if trains.get(name, False)}
            | {f"the optimizer's {name}": copies["optimizer"][name] for name in share.optimizer},
            {name: copies["model"][name] for name in share.model if name not in trains},
        )
        return Copied(images, texts, watched)

    def _together(self, failed: str, work: Callable[[], T], everyone: bool = False) -> list[T]:
        return together(self._ranks, failed, work, everyone)


def _rng(rank: int) -> str:
    return f"rng-{rank:05d}.json"
