"""Saving a state of 1.2 GB, on one and two ranks: ours beside torch.save, safetensors and torch's own distributed
checkpoints, with the limits of this machine in the same table."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import peers
from peers import HERE, Failed, environment, free_port, in_turn, json_line, remove, run, table

TIMEOUT_S = 300.0
PARAMETERS = 100_000_000
WAYS = ("ours", "dcp.async_save", "dcp.save", "torch.save", "safetensors")
STALL_BUDGET, TOTAL_BUDGET, INFLATION_BUDGET = 1.2, 1.1, 1.15


def main() -> int:
    """Measure, print a table for each number of ranks and a JSON line; 1 when our own save failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument(
        "--parameters", type=int, default=PARAMETERS, help="float32 parameters; the state is 12 bytes each"
    )
    parser.add_argument("--quick", action="store_true", help="one round of a small state: all works, it proves nothing")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS, help="only these ways, and the limits")
    parser.add_argument("--folder", type=Path, default=peers.ROOT / ".bench-checkpoints", help="where it is written")
    options = parser.parse_args()
    rounds, parameters = (1, 4_000_000) if options.quick else (options.rounds, options.parameters)
    folder = peers.bin_folder()
    failed: dict[str, str] = {}
    figures: dict[str, Any] = {}
    try:
        with peers.scratch_folder() as scratch:
            for ranks in (1, 2):
                ways = {
                    name: partial(measured, folder, Path(scratch), options.folder, name, ranks, parameters)
                    for name in (*options.only, "limits")
                }
                results, broken = in_turn(ways, rounds)
                failed.update({f"{name}, {ranks} ranks": text for name, text in broken.items()})
                figures[f"{ranks}_ranks"] = report(ranks, results, rounds)
    finally:
        remove(options.folder)
    json_line("checkpoint", rounds, {"parameters": parameters, **figures, "failed": failed})
    return int(any(name.startswith("ours") for name in failed))


def report(ranks: int, results: dict[str, list[dict[str, float]]], rounds: int) -> dict[str, Any]:
    """Medians as a table and as plain values. Each rank copies 1/ranks of the state, all at once; so does the limit."""
    medians: dict[str, dict[str, float]] = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]}
        for name, found in results.items()
        if found
    }
    limits = medians.pop("limits", {})
    rows = [
        [name, *(f"{m[key]:.3f}" for key in ("stall_s", "total_s", "inflation", "load_s")), f"{m['peak_mb']:.0f}"]
        for name, m in medians.items()
    ]
    if limits:
        rows += [
            [
                f"limit: copy of 1/{ranks} into memory that is there",
                f"{limits['copy_s']:.3f}",
                "-",
                "-",
                "-",
                "-",
            ],
            [
                f"limit: copy of 1/{ranks} into fresh memory",
                f"{limits['fresh_copy_s']:.3f}",
                "-",
                "-",
                "-",
                "-",
            ],
            ["limit: write of all with fsync", "-", f"{limits['write_s']:.3f}", "-", "-", "-"],
        ]
    size = next(iter(medians.values()))["bytes"] / 1e9
    head = ["way", "stall s", "total s", "step time x", "load s", "peak MB"]
    table(f"{size:.2f} GB on {ranks} rank{'s' if ranks > 1 else ''}, median of {rounds} rounds", head, rows)
    found: dict[str, Any] = {**medians, "limits": limits}
    if limits and "ours" in medians:
        own = medians["ours"]
        found["stall_to_copy"] = round(own["stall_s"] / limits["copy_s"], 3)
        found["total_to_write"] = round(own["total_s"] / limits["write_s"], 3)
        print(
            f"ours: stall {found['stall_to_copy']} of the copy (budget {STALL_BUDGET}), "
            f"total {found['total_to_write']} of the write (budget {TOTAL_BUDGET}), "
            f"steps {own['inflation']:.2f} (budget {INFLATION_BUDGET})"
        )
    return found


def measured(bin_folder: Path, scratch: Path, folder: Path, way: str, ranks: int, parameters: int) -> dict[str, float]:
    """Run a contestant once; its rank 0's figures. Errors: Failed, also when it left no result."""
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    options = ("--nproc_per_node", str(ranks), "--master_port", str(free_port()))
    what = (way, str(folder), str(result), str(parameters))
    command = [str(bin_folder / "torchrun"), *options, str(HERE / "checkpoint_ranks.py"), *what]
    try:
        done = run(command, environment(scratch), scratch, TIMEOUT_S)
    finally:
        remove(folder)
    if not result.exists():
        raise Failed(f"{' '.join(command)}: it left no result\n{done.output[-2000:]}")
    figures: dict[str, float] = json.loads(result.read_text())
    return figures


if __name__ == "__main__":
    sys.exit(main())
