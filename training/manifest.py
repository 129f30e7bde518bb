"""The manifest of a checkpoint: what makes a folder of files one that can be trusted."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import platform
import re
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors
import torch

from .agree import reason
from .bytestream import Written, digest_of
from .errors import CheckpointError
from .storage import Folder

MANIFEST = "manifest.json"
FORMAT = 1
_FILE = re.compile(r"[a-z0-9][a-z0-9._-]*")


class DamagedError(Exception):
    """A checkpoint's content is not what was written. Never leaves the checkpoint modules as it is."""


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    step: int
    """Optimizer steps done."""
    samples: int
    """Samples consumed by all ranks together."""
    name: str
    """Its folder's name, such as step-000001200."""
    world_size: int
    """Ranks that wrote it."""
    files: dict[str, Written]
    """Size and hash of each file."""
    ledger: dict[str, Any] = field(default_factory=dict)
    """What was consumed, as `ledger` describes it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further state of the training loop, as JSON."""


def describe(
    step: int,
    samples: int,
    world_size: int,
    files: dict[str, Written],
    config: dict[str, Any],
    ledger: dict[str, Any],
    extra: dict[str, Any],
) -> bytes:
    """The manifest's content. `config` is the run's configuration in YAML keys; the others are as in `Found`."""
    body = {
        "format": FORMAT,
        "step": step,
        "samples": samples,
        "world_size": world_size,
        "time": time.time(),
        "versions": {
            "ddp-launcher": _own_version(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "numpy": np.__version__,
            "safetensors": safetensors.__version__,
        },
        "config": config,
        "ledger": ledger,
        "extra": extra,
        "files": {name: {"size": w.size, "xxh3_128": w.xxh3} for name, w in sorted(files.items())},
    }
    body = json.loads(json.dumps(body, default=str))  # as a reader will see it: text keys, dates as text
    return json.dumps({**body, "digest": _digest(body)}, indent=1).encode()


def inspect(folder: Folder, name: str) -> Found:
    """Read the manifest of the checkpoint `name` and verify each of its files.

    Errors: DamagedError with the reason; CheckpointError when storage cannot be read, or a newer version wrote it.
    """
    try:
        found = _parse(name, folder.read(f"{name}/{MANIFEST}"))
        for file in found.files:
            verify(folder, found, file)
    except FileNotFoundError as error:
        raise DamagedError(f"a file is missing: {reason(error)}") from error
    except NotADirectoryError as error:
        raise DamagedError("not a folder") from error
    except OSError as error:
        if error.errno == errno.EIO:  # the medium itself lost it: no later try will read it
            raise DamagedError(reason(error)) from error
        raise CheckpointError(
            f"{folder.full(name)} cannot be read, which says nothing about its content: {reason(error)}; "
            "make it readable and start again, or move it away to use an older one"
        ) from error
    return found


def verify(folder: Folder, found: Found, file: str) -> None:
    """Compare a file with the manifest. Errors: DamagedError, FileNotFoundError, OSError."""
    expected = found.files[file]
    size = folder.size(f"{found.name}/{file}")
    if size is None:
        raise DamagedError(f"{file} is missing")
    if size != expected.size:
        raise DamagedError(f"{file} has {size} bytes, its manifest says {expected.size}")
    if folder.xxh3(f"{found.name}/{file}") != expected.xxh3:
        raise DamagedError(f"{file} has another hash than its manifest says")


def verify_content(found: Found, file: str, content: bytes) -> None:
    """Compare bytes that were read with the manifest. Errors: DamagedError."""
    if file not in found.files:
        raise DamagedError(f"{file} is not in the manifest")
    if digest_of(content) != found.files[file].xxh3:
        raise DamagedError(f"{file} has another hash than its manifest says")


def _parse(name: str, content: bytes) -> Found:
    try:
        body = json.loads(content)
        if body.pop("digest") != _digest(body):
            raise DamagedError(f"{MANIFEST} does not match its own digest")
        if int(body["format"]) > FORMAT:
            raise CheckpointError(
                f"{name} has format {body['format']}, this version reads up to {FORMAT}: update ddp-launcher"
            )
        files = {file: Written(int(w["size"]), str(w["xxh3_128"])) for file, w in body["files"].items()}
        found = Found(
            int(body["step"]),
            int(body["samples"]),
            name,
            int(body["world_size"]),
            files,
            dict(body["ledger"]),
            dict(body["extra"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} is not valid: {type(error).__name__}: {error}") from error
    if int(name.rpartition("-")[2]) != found.step:
        raise DamagedError(f"{MANIFEST} is of step {found.step}")
    _check_whole(found)
    if strange := [file for file in files if not _FILE.fullmatch(file)]:
        raise DamagedError(f"{MANIFEST} names files outside its folder: {strange}")
    return found


def _check_whole(found: Found) -> None:
    """Errors: DamagedError for a manifest that is valid JSON, and yet is not what a save writes."""
    random_states = [file for file in found.files if file.startswith("rng-")]
    needed = ["state.json", "model-00000.safetensors", "optimizer-00000.safetensors"]
    missing = [file for file in needed if file not in found.files]
    if missing or len(random_states) != found.world_size:
        raise DamagedError(f"{MANIFEST} does not name the files of {found.world_size} ranks: {', '.join(found.files)}")
    if min(found.step, found.samples) < 0 or not isinstance(found.extra.get("health", {}), dict):
        raise DamagedError(f"{MANIFEST} does not hold the state of a run")
    ledger = found.ledger
    try:
        if ledger and int(ledger["since"]["samples"]) + int(ledger["samples"]) != found.samples:
            raise DamagedError(
                f"{MANIFEST} is of {found.samples} samples, its ledger of {ledger['samples']} since "
                f"{ledger['since']['samples']}"
            )
        if ledger and not isinstance(ledger["data"], dict):
            raise DamagedError(f"{MANIFEST} has a ledger of no data")
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{MANIFEST} has no valid ledger: {type(error).__name__}: {error}") from error


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _own_version() -> str:
    try:
        return importlib.metadata.version("ddp-launcher")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "source"
