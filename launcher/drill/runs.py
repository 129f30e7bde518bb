"""The runs of a drill: each in a folder of its own below the drill's, launched once and resumed until it is done."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.rehearsal import Fault
from training.runfolder import RunFolder, read_json
from training.storage import Folder

from ..errors import DONE, JOB_FAILED, LaunchError
from ..finish import read_verdict
from ..runspec import load_spec
from ..verify import checkpoint_folder
from ..verify.checkpoints import MANIFEST
from . import child
from .course import at
from .plan import ends

_SAVE = re.compile(r"\.?step-(\d+)(?:\.[0-9a-f]+\.tmp)?")
"""A checkpoint, or a save that is under way or was broken off. Without rename, its manifest makes it a checkpoint."""


@dataclass(frozen=True)
class Met:
    """A fault, and what became of it."""

    fault: Fault
    happened: dict[str, Any] | None
    """What its rank wrote down just before: attempt, step, point. None: it never came to it."""


@dataclass
class Run:
    """One run."""

    home: Path
    """Holds the run folder, the words of each `launch` (launch.log) and the faults that happened (faults.jsonl)."""
    arguments: list[str]
    """Of `launch`, for its first attempt."""
    asked: child.Interrupts
    limit_s: float | None = None
    """The longest that an attempt may take."""
    wall_s: float = 0.0
    attempts: int = 0
    broken: set[str] = field(default_factory=set)
    """Saves that an attempt left unfinished, so that the next one had to begin with an older checkpoint."""
    saved: dict[int, int] = field(default_factory=dict)
    """The step of the newest checkpoint when an attempt had ended, by its number; 0 for none."""
    ranks: list[int] = field(default_factory=list)
    """Of each attempt."""

    @property
    def name(self) -> str:
        return self.home.name

    @property
    def log(self) -> Path:
        return self.home / "launch.log"

    @property
    def record(self) -> Path:
        return self.home / "faults.jsonl"

    @property
    def folder(self) -> RunFolder:
        """Errors: LaunchError before the first attempt has made it."""
        found = [path for path in self.home.iterdir() if RunFolder(path).spec.is_file()]
        if len(found) != 1:
            raise LaunchError(f"{self.name}: its run folder was not made; see {self.log}")
        return RunFolder(found[0])

    @property
    def checkpoints(self) -> Folder:
        """Where its checkpoints are."""
        return checkpoint_folder(self.folder, load_spec(self.folder))

    def attempt(self, faults: list[Fault], overrides: list[str], ranks: int) -> int:
        """Launch the run, or resume it with `overrides`, to meet `faults`; returns the exit code of `launch`.

        Errors: LaunchError when there is no run afterwards, or it does not end in time.
        """
        arguments = ["resume", str(self.folder.path), *overrides] if self.attempts else self.arguments
        ended = child.launch(arguments, self.log, self.record, self.asked, faults, self.limit_s)
        self.attempts += 1
        self.wall_s += ended.wall_s
        self.ranks.append(ranks)
        self._look()
        return ended.exit_code

    def words(self) -> str:
        """Why its last attempt ended, and where to look."""
        attempt = self.folder.last_attempt()
        verdict = read_verdict(attempt) if attempt is not None else None
        said = "; ".join(verdict.lines()) if verdict is not None else ""
        return said or f"see {self.log}"

    def happened(self) -> dict[int, dict[str, Any]]:
        """What the ranks wrote down of faults, by the fault's number."""
        if not self.record.exists():
            return {}
        rows = [json.loads(line) for line in self.record.read_text(encoding="utf-8").splitlines()]
        return {int(row["number"]): row for row in rows}

    def began(self) -> dict[int, int]:
        """The step that each attempt went on from, by its number; one that never came so far is left out."""
        found = {int(path.parent.name): path for path in sorted(self.folder.attempts.glob("[0-9]*/began.json"))}
        return {number: int(read_json(path)["step"]) for number, path in found.items()}

    def steps_again(self) -> int:
        """Steps that were trained a second time, because they were not saved."""
        last: dict[int, int] = {}
        for row in self.metrics():
            if row["kind"] == "train":
                last[row["attempt"]] = row["step"]
        began = self.began()
        return sum(max(0, last[a] - began[b]) for a, b in pairwise(sorted(last)))

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl that are whole, in its order."""
        if not self.folder.metrics.exists():
            return
        for line in self.folder.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and {"attempt", "step", "kind"} <= row.keys():
                yield row

    def lost(self) -> list[str]:
        """Where an attempt did not go on from the newest checkpoint that was there."""
        begun = [(number, step, self.saved.get(number - 1, 0)) for number, step in self.began().items()]
        return [
            f"attempt {number} went on from step {step}, though the checkpoint of step {newest} was there"
            for number, step, newest in begun
            if step != newest
        ]

    def _look(self) -> None:
        """What checkpoints there are: published ones, and saves newer than them that did not come to their end."""
        found, attempt = self.checkpoints, self.folder.last_attempt()
        steps = {name: int(match[1]) for name in found.names() if (match := _SAVE.fullmatch(name))}
        whole = {name for name in steps if name[0] != "." and found.size(f"{name}/{MANIFEST}") is not None}
        newest = max((steps[name] for name in whole), default=0)
        self.broken |= {name for name, step in steps.items() if name not in whole and step > newest}
        if attempt is not None:
            self.saved[attempt.number] = newest


def undisturbed(run: Run, ranks: int) -> None:
    """Run it to its end. Errors: LaunchError when it fails by itself."""
    if run.attempt([], [], ranks) != DONE:
        raise LaunchError(f"{run.name}: the run failed by itself, undisturbed: {run.words()}")


def disturbed(run: Run, parts: list[list[Fault]], counts: list[int], strict: bool) -> Iterator[list[Met]]:
    """Run it to its end through faults; after each attempt, what became of its part of them.

    `counts`: numbers of ranks, of each attempt; one more than parts, the last for one that is left alone. `strict`: a
    save that fails ends an attempt. Errors: LaunchError when an attempt ends for no fault of ours.
    """
    code, ranks = JOB_FAILED, counts[0]
    for part, wanted in zip([*parts, []], counts, strict=True):
        if code == DONE:
            yield [Met(fault, None) for fault in part]
            continue
        before = run.happened().keys()
        code = run.attempt(part, at(wanted) if wanted != ranks else [], wanted)
        ranks, happened = wanted, run.happened()
        struck = [fault for fault in part if fault.number in happened.keys() - before]
        yield [Met(fault, happened.get(fault.number)) for fault in part]
        if code != DONE and not any(ends(fault, strict) for fault in struck):
            raise LaunchError(f"{run.name}: attempt {run.attempts} failed by itself: {run.words()}")
        if code == JOB_FAILED and any(fault.action == "stop" for fault in struck):
            raise LaunchError(f"{run.name}: attempt {run.attempts} did not stop cleanly: {run.words()}")
