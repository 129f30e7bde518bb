"""`launch drill`: rehearses a job of the user's own with faults, and proves that they change nothing. Free of torch."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.storage import open_folder

from .. import specfile, submit
from ..errors import LaunchError, UsageError
from ..screen import Screen
from ..spec import JobSpec
from .certificate import Certificate
from .checks import Drill
from .child import Interrupted, Interrupts
from .course import Course, course


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    spec: str
    overrides: list[str]
    profile: str | None = None
    kills: int = 20
    seed: int | None = None
    steps: int | None = None
    keep: bool = False


def drill(asked: Asked) -> int:
    """Rehearse, print the certificate and write it down; returns the exit code.

    Errors: SpecError and UsageError for what cannot be rehearsed; LaunchError when the job fails by itself.
    """
    if asked.kills < 1:
        raise UsageError(f"--kills: {asked.kills} rehearses nothing; give at least 1")
    resolved = specfile.resolve(Path(asked.spec), asked.overrides, asked.profile)
    shape = course(resolved.spec, asked.steps, asked.kills, os.environ)
    specfile.resolve(Path(asked.spec), [*asked.overrides, *shape.overrides], asked.profile)
    seed = secrets.randbelow(10**6) if asked.seed is None else asked.seed
    home = submit.new_folder(Path(resolved.spec.runs).resolve(), f"{resolved.spec.name}-drill").path
    certificate = _begun(asked, shape, seed, home)
    profile = [] if asked.profile is None else ["--profile", asked.profile]
    arguments = [asked.spec, *asked.overrides, *profile]
    runs = f"{resolved.spec.runs.rstrip('/')}/{home.name}"
    screen = Screen(sys.stdout, bar=False)
    screen.line("\n".join(certificate.head))
    with Interrupts() as interrupts:
        rehearsal = Drill(
            resolved.spec, arguments, shape, home, runs, seed, asked.kills, certificate, interrupts, screen
        )
        try:
            for check in rehearsal.checks():
                certificate.checks.append(check)
            certificate.whole = True
        except LaunchError as error:
            raise LaunchError(f"{error}; all of it is in {home}") from error
        except Interrupted:
            _end(certificate, home, screen)
            return interrupts.exit_code
    _end(certificate, home, screen)
    if certificate.exit_code == 0 and not asked.keep:
        _tidy(certificate, resolved.spec, home)
    return certificate.exit_code


def _begun(asked: Asked, shape: Course, seed: int, home: Path) -> Certificate:
    ranks = f"{shape.ranks} rank{'s' if shape.ranks > 1 else ''}"
    ranks += f", also on {', '.join(map(str, sorted(shape.others)))}" if shape.others else ""
    head = [
        f"drill    {home.name}  ->  {os.path.relpath(home)}",
        f"course   {shape.steps} steps on {ranks}, saved every {shape.every}; {asked.kills} faults, seed {seed}",
    ]
    words = ["launch", "drill", asked.spec, *asked.overrides, "--kills", str(asked.kills), "--seed", str(seed)]
    words += ["--steps", str(shape.steps), *(["--profile", asked.profile] if asked.profile is not None else [])]
    facts: dict[str, Any] = {"seed": seed, "kills": asked.kills, "steps": shape.steps, "every_steps": shape.every}
    facts |= {"ranks": shape.ranks, "other_ranks": list(shape.others), "changed": list(shape.overrides)}
    return Certificate(head, shlex.join(words), facts)


def _end(certificate: Certificate, home: Path, screen: Screen) -> None:
    """Show the certificate and write it down. Errors: LaunchError when it cannot be written."""
    screen.line("\n".join(certificate.lines()[len(certificate.head) :]))
    try:
        certificate.write(home)
    except OSError as error:
        raise LaunchError(f"{home}: the certificate cannot be written: {error.strerror}") from error
    stays = "" if certificate.exit_code == 0 else "; all runs stay beside it"
    screen.line(f"certificate: {os.path.relpath(home / 'certificate.txt')}{stays}")


def _tidy(certificate: Certificate, spec: JobSpec, home: Path) -> None:
    """Remove the checkpoints of a drill that held; its logs and metrics are small."""
    for run in certificate.runs:
        if run.attempts:
            run.checkpoints.remove("")
    if spec.train is not None and spec.train.checkpoint.folder is not None:
        open_folder(f"{spec.train.checkpoint.folder.rstrip('/')}/{home.name}").remove("")
