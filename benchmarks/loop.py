"""Time per optimizer step, two ranks on this machine: our loop beside a hand-written one and other people's loops."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peers
from loop_paired import Paired
from peers import HERE, Failed, environment, free_port, in_turn, json_line, ratios, remove, run, table

RANKS = 2
TIMEOUT_S = 300.0
MODELS = {"synthetic": "784-256-10, random data", "digits": "64-256-10, handwritten digits"}
REFERENCE = "hand-written"
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, log off": {"log": {"every_steps": 10**9}},
    "ours, reproducible": {"reproducible": True},
}
"""Rows of ours, and what their specs say otherwise."""
BUDGET = 1.03
BLOCK = 50
"""Steps that our loop and a bare one take in turn, to see what its guarantees cost."""
PEER_WAYS = {
    REFERENCE: "hand-written+gathers",
    "hand-written, DataLoader": "hand-written",
    "Lightning Trainer": "lightning",
    "Lightning Trainer, gathers": "lightning+gathers",
    "Lightning Fabric": "fabric",
    "Lightning Fabric, gathers": "fabric+gathers",
    "accelerate": "accelerate",
    "accelerate, gathers": "accelerate+gathers",
}
"""Rows of the table, and what loop_ranks.py calls them."""


@dataclass(frozen=True)
class Bench:
    """Where the contestants run, and how many steps they take."""

    bin: Path
    scratch: Path
    warm_up: int
    steps: int

    @property
    def result(self) -> Path:
        return self.scratch / "result.json"


def main() -> int:
    """Measure, print a table for each model and a JSON line; 1 when our own loop failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="rounds that count (default: 5)")
    parser.add_argument("--steps", type=int, help="measured steps of a run (default: 3000)")
    parser.add_argument("--quick", action="store_true", help="one round of few steps: all works, it proves nothing")
    parser.add_argument("--data", choices=list(MODELS), help="only this model")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only ways whose name holds a WORD, and hand-written")
    parser.add_argument("--paired", action="store_true", help="only the table of what our loop's guarantees cost")
    options = parser.parse_args()
    rounds, steps = options.rounds or (1 if options.quick else 5), options.steps or (300 if options.quick else 3000)
    figures: dict[str, Any] = {}
    failed: dict[str, str] = {}
    folder = peers.bin_folder()
    with peers.scratch_folder() as scratch:
        bench = Bench(folder, Path(scratch), max(100, steps // 10), steps)
        for data in [options.data] if options.data else MODELS:
            figures[data] = {} if options.paired else contest(data, bench, rounds, options.only, failed)
            if options.only is None:
                try:
                    figures[data] |= guarantees(data, bench, max(4, rounds * steps // BLOCK // 4))
                except Failed as error:
                    failed[f"ours in turn with a bare loop: {data}"] = str(error).partition("\n")[0]
                    print(error, file=sys.stderr)
    json_line("loop", rounds, {"steps": steps, "budget": BUDGET, **figures, "failed": failed})
    return int(any(name.startswith("ours") for name in failed))


def contest(data: str, bench: Bench, rounds: int, only: list[str] | None, failed: dict[str, str]) -> dict[str, Any]:
    """All contestants in turn on one model; microseconds a step and the ratio to the hand-written loop."""
    ways: dict[str, Callable[[], float]] = {
        name: partial(measured, bench, partial(by_torchrun, bench, way, data)) for name, way in PEER_WAYS.items()
    }
    for name, changes in OURS.items():
        ways[name] = partial(measured, bench, partial(ours, bench, data, changes))
    if only:
        ways = {n: way for n, way in ways.items() if n == REFERENCE or any(w.lower() in n.lower() for w in only)}
    results, broken = in_turn(ways, rounds)
    failed.update({f"{name}: {data}": text for name, text in broken.items()})
    against = ratios(results, REFERENCE)
    figures = {
        name: {
            "us_per_step": round(statistics.median(values), 1),
            "least": round(min(values), 1),
            "most": round(max(values), 1),
            "to_hand_written": round(against[name], 3) if name in against else None,
        }
        for name, values in results.items()
    }
    rows = [[name, *(str(f[c] if f[c] is not None else "-") for c in f)] for name, f in figures.items()]
    rows += [[name, "failed", "-", "-", "-"] for name in broken]
    head = ["loop", "us a step", "least", "most", "to hand-written"]
    title = f"{MODELS[data]}: {RANKS} ranks x 32, {bench.steps} steps, median of {rounds} rounds"
    table(title, head, rows)
    print(f"budget: ours at most {BUDGET} of hand-written")
    return figures


def guarantees(data: str, bench: Bench, blocks: int) -> dict[str, Any]:
    """Our loop beside a bare one in the same processes, blocks in turn.

    Errors: Failed when the run fails.
    """
    steps = Paired.steps(BLOCK, blocks)
    options = {"data": data, "block": BLOCK, "blocks": blocks}
    left: list[list[float]] = attempt(bench, by_launch(bench, "loop_paired:Paired", options, steps, {}))
    ratios_ = sorted(ours / bare for ours, bare in left)
    figures = {
        "ours_us": round(1e6 * statistics.median(ours for ours, _ in left) / BLOCK, 1),
        "bare_us": round(1e6 * statistics.median(bare for _, bare in left) / BLOCK, 1),
        "median": round(statistics.median(ratios_), 3),
        "quarter": round(ratios_[len(ratios_) // 4], 3),
        "three_quarters": round(ratios_[3 * len(ratios_) // 4], 3),
        "of_all_time": round(sum(ours for ours, _ in left) / sum(bare for _, bare in left), 3),
    }
    head = ["in the same ranks, in turn", "ours us", "bare us", "ratio", "1/4", "3/4", "of all time"]
    table(f"{MODELS[data]}: {blocks} x {BLOCK} steps each", head, [["ours to bare", *map(str, figures.values())]])
    return {"guarantees": {"blocks": blocks, **figures}}


def by_torchrun(bench: Bench, way: str, data: str) -> list[str]:
    """The command of a peer."""
    options = ("--nproc_per_node", str(RANKS), "--master_port", str(free_port()))
    what = (way, data, str(bench.warm_up), str(bench.steps), str(bench.result))
    return [str(bench.bin / "torchrun"), *options, str(HERE / "loop_ranks.py"), *what]


def ours(bench: Bench, data: str, changes: dict[str, Any]) -> list[str]:
    """The command of one of our rows."""
    options = {"data": data, "warm_up": bench.warm_up, "steps": bench.steps}
    return by_launch(bench, "loop_task:Measured", options, bench.warm_up + bench.steps + 1, changes)


def by_launch(bench: Bench, task: str, options: dict[str, Any], steps: int, changes: dict[str, Any]) -> list[str]:
    """Our own command: the real entry, with a spec of the same training, but for `changes`."""
    spec = {
        "name": "loop",
        "resources": {"nodes": 1, "tasks_per_node": RANKS},
        "python_path": [str(HERE)],
        "train": {
            "task": task,
            "options": {**options, "result": str(bench.result)},
            "steps": steps,
            "batch": {"per_rank": 32},
            "optim": {"name": "adamw", "base_lr": 1e-3},
            "schedule": {"warmup_steps": 50, "decay": "cosine"},
            "data": {"last": "drop"},
            "device": "cpu",
            "eval": {"at_end": False},
            "checkpoint": {"at_end": False},
            "log": {"every_steps": 10},
            **changes,
        },
    }
    path = bench.scratch / "loop.yaml"
    path.write_text(json.dumps(spec, indent=1))
    return [str(bench.bin / "launch"), str(path), "executor=local"]


def measured(bench: Bench, command: Callable[[], list[str]]) -> float:
    """Run a contestant once; microseconds a step, as its rank 0 saw them.

    Errors: those of `attempt`.
    """
    return float(attempt(bench, command())["us_per_step"])


def attempt(bench: Bench, command: list[str]) -> Any:
    """Run a command; the JSON that it left.

    Errors: Failed, also when it left none.
    """
    bench.result.unlink(missing_ok=True)
    try:
        done = run(command, environment(bench.scratch), bench.scratch, TIMEOUT_S)
    finally:
        remove(bench.scratch / "runs")
    if not bench.result.exists():
        raise Failed(f"{' '.join(command)}: it left no result\n{done.output[-2000:]}")
    return json.loads(bench.result.read_text())


if __name__ == "__main__":
    sys.exit(main())
