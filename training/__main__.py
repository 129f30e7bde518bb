"""`torchrun --nproc_per_node=2 -m training SPEC [key=value ...] [--run-folder DIR]`: training without the launcher.

Without torchrun it is one process: `python -m training SPEC`. An entry point: it joins the spec reader and the loop.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.rendezvous import rendezvous

from ddp_launcher import step_aside
from launcher.errors import BAD_SPEC, DONE, INTERRUPTED, JOB_FAILED, TERMINATED, LaunchError
from launcher.specfile import Resolved, resolve

from .errors import ConfigError, DeviceError, TrainingError
from .leaving import leave
from .ranks import Ranks
from .run import run
from .runfolder import RunFolder, write_json
from .stop import StopFlag, handlers

_WAIT = timedelta(minutes=2)
_KEY = "ddp_launcher/run"


class _Elsewhere(Exception):
    """Rank 0 met an error and has told the user."""


def main(arguments: list[str]) -> int:
    """Run on this rank. Returns the exit code: 0 done, 2 bad spec or usage, 5 failed, 130 or 143 stopped."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("spec", type=Path, help="job spec; its train section is run on the ranks that torchrun started")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the spec's")
    parser.add_argument("--run-folder", type=Path, help="an existing run is resumed there; else a new one is put there")
    options = parser.parse_args(arguments)
    try:
        ranks = Ranks.from_environment(os.environ)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_SPEC
    with handlers(StopFlag()) as stop:
        try:
            folder, attempt, store = _share(options, ranks)
            step_aside(sys.path)
            outcome = run(folder, ranks, attempt, stop)
            del store
        except _Elsewhere:
            return BAD_SPEC
        except (LaunchError, TrainingError) as error:
            if ranks.rank == 0 or isinstance(error, DeviceError):
                print(f"error: {error}", file=sys.stderr)
            bad_spec = isinstance(error, ConfigError) or getattr(error, "exit_code", None) == BAD_SPEC
            return BAD_SPEC if bad_spec else JOB_FAILED
        except KeyboardInterrupt:
            return INTERRUPTED
    if outcome.kind == "done":
        return DONE
    return INTERRUPTED if outcome.reason == signal.SIGINT.name else TERMINATED


def _share(options: argparse.Namespace, ranks: Ranks) -> tuple[RunFolder, int, object]:
    """Run folder and attempt number, made or found by rank 0 and learnt from it by the others; and the store they used.

    The store is returned because rank 0 may be its server: it has to live until the process group has its own.
    Errors: on rank 0 its own; on the others _Elsewhere when rank 0 met one.
    """
    store = next(iter(rendezvous("env://", timeout=_WAIT)))[0] if ranks.world_size > 1 else None
    if ranks.rank == 0:
        try:
            found = _prepare(options, ranks)
        except BaseException:
            if store is not None:
                store.set(_KEY, "null")
            raise
        if store is not None:
            store.set(_KEY, json.dumps(found))
    else:
        assert store is not None
        found = json.loads(store.get(_KEY))
        if found is None:
            raise _Elsewhere
    sys.path[:0] = found["python_path"]
    return RunFolder(Path(found["folder"])), int(found["attempt"]), store


def _prepare(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    resolved = resolve(options.spec, options.overrides)
    if resolved.spec.train is None:
        raise ConfigError(f"{options.spec}: there is no train section; run `launch {options.spec}` for a command")
    asked = resolved.spec.resources.nodes * resolved.spec.resources.tasks_per_node
    if asked != ranks.world_size:
        print(f"note: resources ask for {asked} ranks; here {ranks.world_size} run, as they were started")
    folder = _open_folder(options, resolved)
    base = options.spec.resolve().parent
    return {
        "folder": str(folder.path),
        "attempt": folder.take_attempt().number,
        "python_path": [*(str(base / entry) for entry in resolved.spec.python_path), str(base)],
    }


def _open_folder(options: argparse.Namespace, resolved: Resolved) -> RunFolder:
    """A new run folder (0700) with the resolved spec in it, or the existing one that was named."""
    path = options.run_folder
    if path is None:
        path = Path(resolved.spec.runs) / f"{resolved.spec.name}-{secrets.token_hex(3)}"
    folder = RunFolder(path.resolve())
    if folder.spec.exists():
        if yaml.safe_load(folder.spec.read_text(encoding="utf-8")) != resolved.plain():
            raise ConfigError(
                f"--run-folder: {folder.spec} differs from this spec; edit it there, or take a new folder"
            )
        return folder
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=options.run_folder is not None)
    folder.source.write_text(resolved.source_text, encoding="utf-8")
    write_json(folder.overrides, resolved.overrides)
    staged = folder.path / ".spec.yaml"
    staged.write_text(resolved.dump(), encoding="utf-8")
    staged.rename(folder.spec)  # last: a folder with a spec is a whole one
    return folder


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
