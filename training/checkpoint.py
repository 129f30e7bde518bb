"""Checkpoints: written aside, published last, verified before use. Every rank takes part in every call.

    checkpoints/step-000001200/
      model-00000.safetensors      parameters and buffers
      optimizer-00000.safetensors  tensors of the optimizer
      state.json                   the rest of the optimizer, and names of shared tensors
      rng-00000.json               random states of each rank, written by that rank
      manifest.json                written last: step, samples, versions, and size and SHA-256 of each file

A reader trusts nothing without a valid manifest. It collects the tensors of all files that the manifest lists, so any
rank may write a share of them. On a file system a checkpoint is built in a hidden folder and renamed; on an object
store its manifest is what publishes it. Nothing is ever pickled.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from . import manifest
from .agree import reason, together
from .config import RunConfig, to_plain
from .errors import CheckpointError
from .manifest import MANIFEST, DamagedError, Found
from .ranks import Ranks
from .snapshot import Snapshot, capture, capture_rng, restore, restore_rng
from .storage import Written, open_folder
from .tensorfile import decode, encode

_STEP = re.compile(r"step-(\d+)")
_STAGED = re.compile(r"\.step-\d+\.[0-9a-f]+\.tmp")
T = TypeVar("T")


class Checkpoints:
    """The checkpoints of one run in one folder, a local path or any URL that fsspec opens.

    Each method must be called by all ranks at the same point, after torch.distributed is initialised where there are
    several. What fails on one rank is raised on all of them.
    """

    def __init__(self, folder: str, keep_last: int, ranks: Ranks) -> None:
        """Errors: CheckpointError when keep_last is below 1 or the URL cannot be opened."""
        if keep_last < 1:
            raise CheckpointError(f"train.checkpoint.keep_last: {keep_last}: at least 1 is kept; give 1 or more")
        try:
            self._folder = open_folder(folder)
        except OSError as error:
            raise CheckpointError(f"train.checkpoint.folder: {error}") from error
        self._keep_last = keep_last
        self._ranks = ranks

    def newest(self) -> Found | None:
        """The newest complete checkpoint, the same one on every rank, or None where there is none.

        Rank 0 verifies sizes and hashes. A damaged checkpoint is named on standard error, set aside as step-....bad,
        and the next older one is tried. Errors: CheckpointError when storage cannot be read, which says nothing about
        a checkpoint's content.
        """
        return self._together("no checkpoint was read", self._find)[0]

    def load(self, found: Found, model: nn.Module, optimizer: Optimizer) -> None:
        """Restore the model and the optimizer, and this rank's random states if the world size is the same.

        Errors: CheckpointError when the state does not fit, naming each tensor with both shapes, or when a file
        changed since it was verified.
        """

        def work() -> None:
            notes = restore(self._read(found), model, optimizer)
            if found.world_size == self._ranks.world_size:
                restore_rng(json.loads(self._verified(found, _rng(self._ranks.rank))))
            for note in notes if self._ranks.rank == 0 else []:
                _say(f"{self._folder.full(found.name)}: {note}")

        self._together(f"{self._folder.full(found.name)} was not loaded", work, everyone=True)

    def save(
        self,
        step: int,
        samples: int,
        model: nn.Module,
        optimizer: Optimizer,
        config: RunConfig,
        ledger: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Write and publish a checkpoint of the bare `model` after `step` optimizer steps and `samples` samples.

        `ledger` is this rank's part of the ledger, `extra` further state of the loop, alike on all ranks; both JSON.

        A good checkpoint of the same step and samples is left as it is. When it returns, the new one is durable and
        older ones beyond keep_last are gone. Errors: CheckpointError naming path and reason; older checkpoints are
        intact then.
        """
        failed = f"the checkpoint of step {step} was not written, older ones are intact"
        place = self._together(failed, lambda: self._prepare(step, samples))[0]
        if place is None:
            return
        try:
            shares = self._together(failed, lambda: self._write_share(place, model, optimizer), everyone=True)
            files = {name: written for share in shares if share for name, written in share.items()}
            self._together(failed, lambda: self._publish(place, step, samples, files, config, ledger, extra))
        except CheckpointError:
            if self._ranks.rank == 0:
                self._drop(place)
            raise
        if self._ranks.rank == 0:
            self._retire(step)

    def _find(self) -> Found | None:
        steps = self._steps()
        for step in sorted(steps, reverse=True):
            name = steps[step]
            if not self._folder.atomic and self._folder.size(f"{name}/{MANIFEST}") is None:
                _say(f"{self._folder.full(name)}: no {MANIFEST}, its writing did not end; an older one is used")
                continue
            try:
                return manifest.inspect(self._folder, name)
            except DamagedError as damage:
                self._set_aside(name, damage)
        if steps:
            _say(f"{self._folder.full('')}: no good checkpoint is left, so training starts from step 0")
        return None

    def _prepare(self, step: int, samples: int) -> str | None:
        """Clean up after killed saves, and make the folder to write to. None: this step is saved already."""
        self._folder.make("")
        for name in self._folder.names():
            abandoned = not self._folder.atomic and _STEP.fullmatch(name) is not None
            if _STAGED.fullmatch(name) or (abandoned and self._folder.size(f"{name}/{MANIFEST}") is None):
                self._drop(name)
        final = _name(step)
        if self._saved_already(final, samples):
            return None
        place = f".{final}.{secrets.token_hex(4)}.tmp" if self._folder.atomic else final
        self._folder.make(place)
        return place

    def _saved_already(self, final: str, samples: int) -> bool:
        if final not in self._folder.names():
            return False
        try:
            there = manifest.inspect(self._folder, final)
        except DamagedError as damage:
            self._set_aside(final, damage)
            return False
        if there.samples == samples:
            return True
        raise CheckpointError(
            f"{self._folder.full(final)} exists with {there.samples} samples, this run has seen {samples}: another run "
            "writes here; give this one a train.checkpoint.folder of its own"
        )

    def _write_share(self, place: str, model: nn.Module, optimizer: Optimizer) -> dict[str, Written]:
        """Write this rank's files: its random states, and on rank 0 the model and the optimizer, alike on all ranks."""
        self._folder.make(place)  # asks the server, where this node's view of a shared folder may be old
        rng = json.dumps(capture_rng()).encode()
        name = _rng(self._ranks.rank)
        files = {name: self._folder.write(f"{place}/{name}", [rng])}
        if self._ranks.rank == 0:
            snapshot = capture(model, optimizer)
            for name, tensors in (
                ("model-00000.safetensors", snapshot.model),
                ("optimizer-00000.safetensors", snapshot.optimizer),
            ):
                files[name] = self._folder.write(f"{place}/{name}", encode(tensors))
            plain = json.dumps(snapshot.plain, indent=1).encode()
            files["state.json"] = self._folder.write(f"{place}/state.json", [plain])
        return files

    def _publish(
        self,
        place: str,
        step: int,
        samples: int,
        files: dict[str, Written],
        config: RunConfig,
        ledger: dict[str, Any] | None,
        extra: dict[str, Any] | None,
    ) -> None:
        described = manifest.describe(
            step, samples, self._ranks.world_size, files, to_plain(config), ledger or {}, extra or {}
        )
        self._folder.flush(place)
        self._folder.write(f"{place}/{MANIFEST}", [described])
        if not self._folder.atomic:
            return
        self._folder.flush(place)
        try:
            self._folder.publish(place, _name(step))
        except FileExistsError:
            if not self._saved_already(_name(step), samples):
                self._folder.publish(place, _name(step))
            self._drop(place)

    def _retire(self, step: int) -> None:
        """Remove all but the newest keep_last checkpoints up to `step`, which was published just now."""
        try:
            steps = self._steps()
            for old in sorted((s for s in steps if s < step), reverse=True)[self._keep_last - 1 :]:
                name = steps[old]
                if self._folder.atomic:  # out of sight first: a removal that is cut short leaves nothing half there
                    name = f".{name}.{secrets.token_hex(4)}.tmp"
                    self._folder.publish(steps[old], name)
                else:
                    self._folder.remove(f"{name}/{MANIFEST}")
                self._drop(name)
        except OSError as error:
            _say(f"old checkpoints were not removed: {reason(error)}")

    def _steps(self) -> dict[int, str]:
        matches = [_STEP.fullmatch(name) for name in self._folder.names()]
        return {int(match[1]): match[0] for match in matches if match}

    def _set_aside(self, name: str, damage: DamagedError) -> None:
        taken = self._folder.names()
        ends = [".bad", *(f".bad-{n}" for n in range(2, len(taken) + 3))]
        aside = next(name + end for end in ends if name + end not in taken)
        try:
            self._folder.publish(name, aside)
        except OSError as error:
            _say(f"{self._folder.full(name)} is damaged ({damage}) and could not be set aside: {reason(error)}")
        else:
            _say(f"{self._folder.full(name)} is damaged ({damage}); set aside as {aside}")

    def _drop(self, name: str) -> None:
        try:
            self._folder.remove(name)
        except OSError as error:
            _say(f"an unfinished or old checkpoint was not removed: {reason(error)}")

    def _read(self, found: Found) -> Snapshot:
        tensors: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
        for name in sorted(found.files):
            kind = name.partition("-")[0]
            if kind in tensors and name.endswith(".safetensors"):
                path = self._folder.local(f"{found.name}/{name}")
                if path is None:
                    tensors[kind].update(decode(self._verified(found, name)))
                else:
                    manifest.verify(self._folder, found, name)
                    tensors[kind].update(decode(path))
        plain = json.loads(self._verified(found, "state.json"))
        return Snapshot(tensors["model"], tensors["optimizer"], plain)

    def _verified(self, found: Found, name: str) -> bytes:
        content = self._folder.read(f"{found.name}/{name}")
        manifest.verify_content(found, name, content)
        return content

    def _together(self, failed: str, work: Callable[[], T], everyone: bool = False) -> list[T]:
        return together(self._ranks, failed, work, everyone)


def _name(step: int) -> str:
    return f"step-{step:09d}"


def _rng(rank: int) -> str:
    return f"rng-{rank:05d}.json"


def _say(text: str) -> None:
    print(f"checkpoint: {text}", file=sys.stderr, flush=True)
