"""What one rank of benchmarks/launch.py runs: `start_rank.py allreduce | step`. It notes when it got how far."""

import time

NOTED = {"process": time.monotonic()}

import json  # noqa: E402 - the first line above is the first of the measured times
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

FEATURES, HIDDEN, CLASSES, MICRO_BATCH = 64, 256, 10, 32


def note(event: str) -> None:
    """Remember the time of an event, on the clock that all processes of a machine share."""
    NOTED[event] = time.monotonic()


def write(rank: int) -> None:
    """Leave the noted times where the benchmark looks for them."""
    folder = Path(os.environ["BENCH_NOTES"])
    staged = folder / f".{rank}"
    staged.write_text(json.dumps(NOTED))
    staged.rename(folder / f"{rank}.json")


def main(what: str) -> None:
    """Import torch, meet the others, then one all-reduce, or one optimizer step of a small model."""
    import torch
    import torch.distributed as dist

    note("torch")
    dist.init_process_group("gloo")
    note("group")
    if what == "allreduce":
        dist.all_reduce(torch.ones(1))
    else:
        _step()
    note("done")
    write(dist.get_rank())
    if what == "step":
        # Without clean-up, as in loop_ranks.py: after DDP's all-reduce it aborts in one of about twenty runs.
        dist.barrier()
        os._exit(0)
    dist.destroy_process_group()


def _step() -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    x, y = torch.randn(MICRO_BATCH, FEATURES), torch.randint(CLASSES, (MICRO_BATCH,))
    nn.functional.cross_entropy(ddp(x), y).backward()
    optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1])
