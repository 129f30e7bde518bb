"""Samples per second of the loader on this machine, beside a bare numpy loop over the same memory-mapped file.

Token rows are 2 KB each; records are of 200 to 4,000 bytes, found by a table of offsets. Both are read in a shuffled
order, in batches of 32. Run it on an idle machine: figures taken under load are figures of the load.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peers
from peers import ROOT, Failed, in_turn, json_line, table

BATCH = 32
ROW_TOKENS = 1024
"""Of two bytes each."""
BUDGET = 0.8
"""Least share of the bare loop's rate, without workers."""


def main() -> int:
    """Measure, print a table for each kind of data and a JSON line; 1 when a budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--samples", type=int, default=200_000, help="samples of the data sets (default: 200000)")
    parser.add_argument("--quick", action="store_true", help="one round of few samples: all works, it proves nothing")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "DATA", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return measure(*options.one)
    rounds, samples = (1, 20_000) if options.quick else (options.rounds, options.samples)
    figures: dict[str, Any] = {}
    kept = True
    with peers.scratch_folder() as scratch:
        for data in ("rows", "records"):
            write(data, samples, Path(scratch))
            figures[data] = contest(data, Path(scratch), rounds)
            ours, both = (figures[data].get(way, {}).get("to_bare", 0) for way in ("ours", "ours, 2 workers"))
            kept &= ours >= BUDGET and both >= ours
    print(f"\nbudget: without workers at least {BUDGET} of the bare loop, with 2 workers no less than without")
    json_line("loader", rounds, {"samples": samples, "batch": BATCH, "budget": BUDGET, "kept": kept, **figures})
    return int(not kept)
