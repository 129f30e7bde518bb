"""How long a user waits: the commands' own start-up, and from a command to the first all-reduce and optimizer step."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peers
from peers import HERE, ROOT, Failed, environment, free_port, in_turn, json_line, ratios, remove, run, table

RANKS = 4
TIMEOUT_S = 120.0
BUDGETS_MS = {"launch --help": 100, "launch check": 200, "launch --dry-run": 300}
EVENTS = ("process", "torch", "group", "done")
"""What each rank notes. A phase ends when the last rank has noted its event."""
REFERENCE = "torchrun"
BUDGET = 0.75
"""Of torchrun's time to the first all-reduce, for a training run of ours."""


@dataclass(frozen=True)
class Bench:
    """Where the measured commands are and run."""

    bin: Path
    scratch: Path

    def command(self, name: str, *arguments: str) -> list[str]:
        return [str(self.bin / name), *arguments]


def main() -> int:
    """Measure what was asked for, print tables and a JSON line; 1 when one of our own commands failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="rounds that count (default: 9 for start-up, 5 for the rest)")
    parser.add_argument("--quick", action="store_true", help="one round of each: shows that all works, proves nothing")
    parser.add_argument("--part", choices=["startup", "allreduce", "step"], help="only this part")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    parts = [options.part] if options.part else ["startup", "allreduce", "step"]
    figures: dict[str, Any] = {}
    failed: dict[str, str] = {}
    folder = peers.bin_folder()
    with peers.scratch_folder() as scratch:
        bench = Bench(folder, Path(scratch))
        for part in parts:
            if part == "startup":
                figures[part] = startup(bench, options.rounds or (1 if options.quick else 9), failed)
            else:
                figures[part] = first(part, bench, rounds, failed)
    json_line("launch", rounds, {**figures, "failed": failed})
    return int(any(name.startswith(("launch", "ours")) for name in failed))


def startup(bench: Bench, rounds: int, failed: dict[str, str]) -> dict[str, Any]:
    """Commands that only show or check something: milliseconds above a bare interpreter."""
    spec = str(ROOT / "configs" / "ddp_2node.yaml")
    commands = {
        "python -c pass": bench.command("python", "-c", "pass"),
        "launch --help": bench.command("launch", "--help"),
        "launch check": bench.command("launch", "check", spec),
        "launch --dry-run": bench.command("launch", spec, "--dry-run", "executor=slurm"),
        "torchrun --help": bench.command("torchrun", "--help"),
        "accelerate --help": bench.command("accelerate", "--help"),
    }
    env = environment(bench.scratch)

    def timed(command: list[str]) -> Callable[[], float]:
        return lambda: 1000 * run(command, env, bench.scratch, TIMEOUT_S).seconds

    results, broken = in_turn({name: timed(command) for name, command in commands.items()}, rounds)
    failed.update(broken)
    medians = {name: statistics.median(values) for name, values in results.items()}
    bare = medians.get("python -c pass", 0.0)
    figures = {
        name: {"ms": round(value, 1), "above_bare_ms": round(value - bare, 1), "budget_ms": BUDGETS_MS.get(name)}
        for name, value in medians.items()
    }
    rows = [
        [name, f"{f['ms']:.0f}", f"{f['above_bare_ms']:.0f}", str(f["budget_ms"] or "-")] for name, f in figures.items()
    ]
    rows += [[name, "failed", "-", "-"] for name in broken]
    table(f"Start-up, median of {rounds} rounds", ["command", "ms", "above bare", "budget"], rows)
    return figures


def first(what: str, bench: Bench, rounds: int, failed: dict[str, str]) -> dict[str, Any]:
    """From the command to the first all-reduce, or the first optimizer step, of four ranks on this machine."""
    ways = ways_to_start(what, bench)
    results, broken = in_turn({name: partial(measured, bench, way) for name, way in ways.items()}, rounds)
    failed.update({f"{name}: {what}": text for name, text in broken.items()})
    against = ratios({name: [r["total"] for r in runs] for name, runs in results.items()}, REFERENCE)
    phases = (*EVENTS, "total", "exit")
    figures: dict[str, Any] = {}
    for name, runs in results.items():
        figures[name] = {phase: round(statistics.median(r[phase] for r in runs), 3) for phase in phases}
        figures[name]["to_torchrun"] = round(against[name], 3) if name in against else None
    goal = "all-reduce" if what == "allreduce" else "step"
    head = ["way", "process", "import torch", "group", goal, "in all", "to torchrun", "exit"]
    columns = (*EVENTS, "total", "to_torchrun", "exit")
    rows = [[name, *(f"{f[c]:.2f}" if f[c] is not None else "-" for c in columns)] for name, f in figures.items()]
    rows += [[name, "failed", *["-"] * (len(head) - 2)] for name in broken]
    table(f"Command to first {goal}, {RANKS} ranks, seconds a phase, median of {rounds} rounds", head, rows)
    if what == "allreduce":
        print(f"budget: ours, train: at most {BUDGET} of torchrun in all")
    return figures


def ways_to_start(what: str, bench: Bench) -> dict[str, Callable[[], list[str]]]:
    """Each way's command. Where a port has to be given, a free one is taken for each run."""
    script = str(HERE / "start_rank.py")
    torchrun = ("--nproc_per_node", str(RANKS), "--master_port")
    ours = spec_file(bench, f"train-{what}", f"train: {training(what)}")
    ways = {
        "torchrun": lambda: bench.command("torchrun", *torchrun, str(free_port()), script, what),
        "ours, train": lambda: bench.command("launch", ours, "executor=local"),
    }
    if what == "step":
        return ways
    by_command = spec_file(bench, "command", f"command: {json.dumps(bench.command('python', script, what))}")
    # Without mpirun, --multi_gpu is the way in which accelerate starts several ranks; the script stays on the CPU.
    accelerate = shlex.split(f"launch --multi_gpu --num_machines 1 --num_processes {RANKS} --mixed_precision no")
    accelerate += ["--dynamo_backend", "no", "--main_process_port"]
    folder = str(bench.scratch / "submitit")
    submitit = str(HERE / "start_submitit.py")
    return {
        "torchrun": ways["torchrun"],
        "accelerate launch": lambda: bench.command("accelerate", *accelerate, str(free_port()), script, what),
        "submitit local": lambda: bench.command("python", submitit, folder, str(free_port()), str(RANKS), what),
        "bare processes": lambda: bare(bench, script, what),
        "ours, command": lambda: bench.command("launch", by_command, "executor=local"),
        "ours, train": ways["ours, train"],
    }


def bare(bench: Bench, script: str, what: str) -> list[str]:
    """The ranks as processes in the background of a shell."""
    shared = f"WORLD_SIZE={RANKS} MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}"
    python = shlex.join(bench.command("python", script, what))
    return ["sh", "-c", " ".join(f"{shared} RANK={rank} {python} &" for rank in range(RANKS)) + " wait"]


def training(what: str) -> str:
    """A `train:` section of one step."""
    values = {
        "task": "start_task:Start",
        "options": {"what": what},
        "steps": 1,
        "batch": {"per_rank": 32},
        "device": "cpu",
        "eval": {"at_end": False},
        "checkpoint": {"at_end": False},
    }
    return json.dumps(values)


def spec_file(bench: Bench, name: str, payload: str) -> str:
    """Write a spec of four ranks on one node; returns its path."""
    path = bench.scratch / f"{name}.yaml"
    resources = json.dumps({"nodes": 1, "tasks_per_node": RANKS})
    path.write_text(f"name: start\nresources: {resources}\npython_path: {json.dumps([str(HERE)])}\n{payload}\n")
    return str(path)


def measured(bench: Bench, way: Callable[[], list[str]]) -> dict[str, float]:
    """Run a way once; seconds of each phase, `total` up to the last event, `exit` up to the command's end.

    Errors: Failed, also when a rank left no note.
    """
    notes = bench.scratch / "notes"
    notes.mkdir()
    try:
        command = way()
        done = run(command, environment(bench.scratch, BENCH_NOTES=str(notes)), bench.scratch, TIMEOUT_S)
        ranks = [json.loads(path.read_text()) for path in notes.glob("*.json")]
        if len(ranks) != RANKS:
            raise Failed(f"{shlex.join(command)}: {len(ranks)} of {RANKS} ranks came through\n{done.output[-2000:]}")
        ends = [max(rank[event] for rank in ranks) for event in EVENTS]
    finally:
        for folder in ("notes", "runs", "submitit"):
            remove(bench.scratch / folder)
    phases = dict(zip(EVENTS, (b - a for a, b in zip([done.started, *ends], ends, strict=False)), strict=True))
    return {**phases, "total": ends[-1] - done.started, "exit": done.seconds}


if __name__ == "__main__":
    sys.exit(main())
