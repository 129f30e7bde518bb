"""Changes of a run's spec by `launch resume`: written down, and taken back when no attempt could begin with them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from training.runfolder import RunFolder, append_json

from . import finish
from .errors import BAD_SPEC

_REFUSALS = ("ConfigError", "CheckpointError", "DataError")
"""What ranks raise when what they are given does not fit together."""


def amend(run: RunFolder, text: str, overrides: list[str], changed: dict[str, str]) -> None:
    """Give the run another spec. The one before it is kept, for `take_back`. Errors: OSError."""
    _write(run.spec_before, run.spec.read_text(encoding="utf-8"))
    _write(run.spec, text)
    append_json(run.resumes_jsonl, {"time": time.time(), "overrides": overrides, "changed": changed})


def take_back(run: RunFolder) -> int | None:
    """Bring the spec before the last change back, if the run's last attempt was refused with the changed one.

    Returns that attempt's number, or None when nothing was to be done: the attempt began, failed otherwise, or was
    there before the change. Errors: OSError.
    """
    attempt = run.last_attempt()
    if attempt is None or not run.spec_before.exists() or attempt.began.exists():
        return None
    verdict = finish.read_verdict(attempt)
    if verdict is None or not (verdict.exit_code == BAD_SPEC or (verdict.text or "").startswith(_REFUSALS)):
        return None
    if attempt.path.stat().st_mtime < run.spec_before.stat().st_mtime:
        return None
    run.spec_before.replace(run.spec)
    append_json(run.resumes_jsonl, {"time": time.time(), "taken_back": attempt.number})
    return attempt.number


def _write(path: Path, text: str) -> None:
    staged = path.with_name(f".{path.name}.new")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(text)
    staged.replace(path)
