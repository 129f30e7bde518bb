"""What runs on a node: `ddp_launcher.py rank | host | finish ...`, called by srun, by submitit and by the batch script."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .errors import BAD_SPEC


def main(arguments: list[str]) -> int:
    """Join an entry to its module. The callable that `rank` and `host` run comes from submitit's pickle of our own run."""
    match arguments:
        case ["rank" | "host", folder]:
            from .executors import run_pickled

            run_pickled(Path(folder))
            return 0
        case ["finish", *rest] if len(rest) == 4:
            from . import finish

            return finish.main(rest, os.environ)
    print(f"launch: {arguments!r} is no entry of a node", file=sys.stderr)
    return BAD_SPEC
