"""What starts by our own file: `ddp_launcher.py rank | host | finish ...`, called by srun, submitit and the batch
script on a node; and `ddp_launcher.py launch ...`, the command itself, for a `launch` that starts another."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from training.leaving import leave

from .errors import BAD_SPEC


def main(arguments: list[str]) -> int:
    """Join an entry to its module. What `rank` and `host` run is submitit's pickle, which our `launch` wrote."""
    match arguments:
        case ["rank" | "host", folder]:
            os.environ.setdefault("SUBMITIT_LOG_LEVEL", "ERROR")  # its chatter would stand in every rank's log
            from .executors import run_pickled

            run_pickled(Path(folder))
            leave(0)
        case ["finish", *rest] if len(rest) == 4:
            from . import finish

            return finish.main(rest, os.environ)
        case ["launch", *rest]:
            from .cli import main as launch

            return launch(rest)
    print(f"launch: {arguments!r} is no entry of ours", file=sys.stderr)
    return BAD_SPEC
