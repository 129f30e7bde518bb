"""The ranks of benchmarks/launch.py by submitit's own local executor: `start_submitit.py FOLDER PORT RANKS WHAT`."""

import os
import runpy
import sys
from pathlib import Path

import submitit


def rank(script: str, port: int, what: str) -> None:
    """One task: give the script the variables that it needs, and run it."""
    place = submitit.JobEnvironment()
    os.environ.update(
        RANK=str(place.global_rank),
        WORLD_SIZE=str(place.num_tasks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.argv = [script, what]
    runpy.run_path(script, run_name="__main__")


def main(folder: str, port: str, ranks: str, what: str) -> None:
    """Submit the ranks as the tasks of one local job, and wait for them."""
    executor = submitit.LocalExecutor(folder=folder)
    executor.update_parameters(tasks_per_node=int(ranks), timeout_min=5)
    executor.submit(rank, str(Path(__file__).with_name("start_rank.py")), int(port), what).results()


if __name__ == "__main__":
    main(*sys.argv[1:])
