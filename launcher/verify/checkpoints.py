"""Checkpoints as they lie in their folder: every manifest and every file is hashed. Free of torch."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from training.storage import Folder

from .report import Check, count

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d+)")
_ASIDE = re.compile(r"step-\d+\.bad(-\d+)?")
_STAGED = re.compile(r"\.step-\d+\.[0-9a-f]+\.tmp")
_LATEST_FORMAT = 1


@dataclass(frozen=True)
class Kept:
    """A checkpoint whose manifest is what was written."""

    name: str
    step: int
    samples: int
    world_size: int
    files: dict[str, dict[str, Any]]
    """Size and hash by file name."""
    ledger: dict[str, Any]
    versions: dict[str, str]


def read(folder: Folder) -> tuple[list[Kept], Check]:
    """All checkpoints with a good manifest, by step, and whether every file is what its manifest says.

    Errors: OSError when the folder cannot be read at all.
    """
    check, kept, size = Check("checkpoints"), [], 0
    names = folder.names()
    found = [name for name in names if _STEP.fullmatch(name)]
    for name in found:
        try:
            one = parse(folder, name)
        except (OSError, ValueError) as error:
            check.faults.append(f"{folder.full(f'{name}/{MANIFEST}')}: {_words(error)}")
            continue
        kept.append(one)
        size += sum(int(file["size"]) for file in one.files.values())
        random_states = sum(file.startswith("rng-") for file in one.files)
        if "state.json" not in one.files or random_states != one.world_size:
            named = ", ".join(one.files) or "none"
            check.faults.append(
                f"{folder.full(f'{name}/{MANIFEST}')}: does not name the files of {one.world_size} ranks, but {named}"
            )
        check.faults += [f"{folder.full(f'{name}/{file}')}: {fault}" for file, fault in _damage(folder, one)]
    if found:
        files = count(sum(len(one.files) for one in kept), "file")
        newest = f", the newest of step {max(one.step for one in kept):,}" if kept else ""
        check.text = f"{len(kept)} of {len(found)} whole{newest}; {files} with {size:,} bytes are as they were written"
    check.notes += [f"{name} was damaged, and set aside by a later attempt" for name in names if _ASIDE.fullmatch(name)]
    if unfinished := sum(_STAGED.fullmatch(name) is not None for name in names):
        check.notes.append(f"{count(unfinished, 'save')} did not end; what is left of it goes with the next save")
    return sorted(kept, key=lambda one: one.step), check


def set_aside(folder: Folder) -> set[int]:
    """Steps of the checkpoints that an attempt found damaged."""
    return {int(name[5:].partition(".")[0]) for name in folder.names() if _ASIDE.fullmatch(name)}


def parse(folder: Folder, name: str) -> Kept:
    """The manifest of the checkpoint `name`. Errors: OSError; ValueError with what is wrong."""
    try:
        body = json.loads(folder.read(f"{name}/{MANIFEST}"))
        digest = body.pop("digest")
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"is not valid: {type(error).__name__}: {error}") from error
    if digest != hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest():
        raise ValueError("does not match its own digest")
    try:
        if int(body["format"]) > _LATEST_FORMAT:
            raise ValueError(
                f"has format {body['format']}, this version reads up to {_LATEST_FORMAT}: update ddp-launcher"
            )
        kept = Kept(
            name,
            int(body["step"]),
            int(body["samples"]),
            int(body["world_size"]),
            {str(file): dict(facts) for file, facts in body["files"].items()},
            dict(body.get("ledger", {})),
            dict(body["versions"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is not valid: {type(error).__name__}: {error}") from error
    if f"step-{kept.step:09d}" != name:
        raise ValueError(f"is of step {kept.step}")
    return kept


def _damage(folder: Folder, one: Kept) -> list[tuple[str, str]]:
    faults = []
    for file, expected in one.files.items():
        try:
            size = folder.size(f"{one.name}/{file}")
            if size is None:
                faults.append((file, "is missing"))
            elif size != expected["size"]:
                faults.append((file, f"has {size:,} bytes, its manifest says {expected['size']:,}"))
            elif folder.xxh3(f"{one.name}/{file}") != expected["xxh3_128"]:
                faults.append((file, "has other bytes than were written: its hash differs from its manifest's"))
        except OSError as error:
            faults.append((file, _words(error)))
    return faults


def _words(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
