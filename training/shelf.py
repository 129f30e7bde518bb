"""The checkpoints that stand in a folder: finding the newest good one, adding one, removing old ones. Rank 0 only."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from . import manifest
from .agree import reason
from .errors import CheckpointError
from .manifest import MANIFEST, DamagedError, Found
from .storage import Folder
from .telling import tell

_STEP = re.compile(r"step-(\d+)")
_OWNER = "owner.json"
"""Names the run whose checkpoints these are, in a folder outside of the run's own."""
_STAGED = re.compile(r"\.step-\d+\.[0-9a-f]+\.tmp")


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay. The newest good one always does."""

    last: int = 1
    """So many of the newest."""
    every: int | None = None
    """And each whose step is a multiple of it, for ever."""
    best: bool = False
    """And the one with the best score."""


class Shelf:
    """Checkpoints by step in one folder. Trouble with what is old is said; trouble with what is new is raised."""

    def __init__(self, folder: Folder, keep: Keep) -> None:
        self._folder, self._keep = folder, keep
        self.scores: dict[int, float] = {}
        """Score of a checkpoint by step, the higher the better."""
        self.aside: dict[str, str] = {}
        """What was set aside: the name that it has now, and why."""

    def claim(self, run: str) -> str:
        """Make the folder that run's own, unless it is another's already; returns whose it is. Errors: OSError."""
        self._folder.make("")
        for _ in range(2):
            try:
                return str(json.loads(self._folder.read(_OWNER))["run"])
            except FileNotFoundError:
                pass
            except (ValueError, KeyError, TypeError):
                self._folder.remove(_OWNER)  # its writing did not end
            try:
                self._folder.write(_OWNER, [json.dumps({"run": run}).encode()], True)
                self._folder.flush("")
            except FileExistsError:
                continue  # another run was faster
        return run

    def newest(self, wanted: Callable[[int], bool] | None = None, set_aside: bool = True) -> Found | None:
        """The newest good checkpoint, of those whose step is wanted. Damaged ones are named, and set aside if asked.

        Errors: CheckpointError when storage cannot be read, which says nothing about a checkpoint's content.
        """
        steps = self._steps()
        for step in sorted((s for s in steps if wanted is None or wanted(s)), reverse=True):
            name = steps[step]
            if not self._folder.atomic and self._folder.size(f"{name}/{MANIFEST}") is None:
                say(f"{self._folder.full(name)}: no {MANIFEST}, its writing did not end; an older one is used")
                continue
            try:
                return manifest.inspect(self._folder, name)
            except DamagedError as damage:
                if set_aside:
                    self._set_aside(name, damage)
                else:
                    say(f"{self._folder.full(name)} is damaged ({damage}); an older one is used")
        if steps and wanted is None and set_aside:
            say(f"{self._folder.full('')}: no good checkpoint is left, so training starts from step 0")
        return None

    def prepare(self, step: int, samples: int) -> str | None:
        """Clean up after killed saves, and make the folder to write to. None: this step is saved already."""
        self._folder.make("")
        for name in self._folder.names():
            abandoned = not self._folder.atomic and _STEP.fullmatch(name) is not None
            if _STAGED.fullmatch(name) or (abandoned and self._folder.size(f"{name}/{MANIFEST}") is None):
                self.drop(name)
        final = _name(step)
        if self._saved_already(final, samples):
            return None
        place = f".{final}.{secrets.token_hex(4)}.tmp" if self._folder.atomic else final
        try:
            self._folder.make(place)
        except OSError:
            self.drop(place)
            raise
        return place

    def publish(self, place: str, step: int, samples: int, described: bytes) -> None:
        """Write the manifest of the files at `place`, and give the checkpoint its name."""
        self._folder.flush(place)
        try:
            self._folder.write(f"{place}/{MANIFEST}", [described], True)
        except FileExistsError as error:
            raise CheckpointError(f"{self._folder.full(place)} was published by another process meanwhile") from error
        if not self._folder.atomic:
            return
        self._folder.flush(place)
        try:
            self._folder.publish(place, _name(step))
        except FileExistsError:
            if not self._saved_already(_name(step), samples):
                self._folder.publish(place, _name(step))
            self.drop(place)

    def retire(self, step: int) -> None:
        """Remove what need not be kept of the checkpoints before `step`, which was published just now."""
        try:
            steps = self._steps()
            for old in sorted((s for s in steps if s < step), reverse=True)[self._keep.last - 1 :]:
                if not self._stays(old, steps):
                    self._remove(steps[old])
        except OSError as error:
            say(f"old checkpoints were not removed: {reason(error)}")

    def drop(self, name: str) -> None:
        """Remove an unfinished or old checkpoint."""
        try:
            self._folder.remove(name)
        except OSError as error:
            say(f"an unfinished or old checkpoint was not removed: {reason(error)}")

    def _stays(self, step: int, steps: dict[int, str]) -> bool:
        if self._keep.every is not None and step % self._keep.every == 0:
            return True
        scored = [s for s in steps if s in self.scores]
        return self._keep.best and bool(scored) and step == max(scored, key=lambda s: (self.scores[s], s))

    def _remove(self, name: str) -> None:
        if self._folder.atomic:  # out of sight first: a removal that is cut short leaves nothing half there
            hidden = f".{name}.{secrets.token_hex(4)}.tmp"
            self._folder.publish(name, hidden)
            name = hidden
        else:
            self._folder.remove(f"{name}/{MANIFEST}")
        self.drop(name)

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
            say(f"{self._folder.full(name)} is damaged ({damage}) and could not be set aside: {reason(error)}")
        else:
            self.aside[aside] = str(damage)
            say(f"{self._folder.full(name)} is damaged ({damage}); set aside as {aside}")


def say(text: str) -> None:
    """A line for people on standard error."""
    tell(f"checkpoint: {text}")


def _name(step: int) -> str:
    return f"step-{step:09d}"
