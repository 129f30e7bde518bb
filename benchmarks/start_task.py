"""What our own loop runs in benchmarks/launch.py: the same work as start_rank.py, as a user's task."""

import json
import os
import time
from pathlib import Path

import start_rank
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class Samples:
    """As many random samples as one step of four ranks takes."""

    def __init__(self) -> None:
        count = 4 * start_rank.MICRO_BATCH
        self.x, self.y = torch.randn(count, start_rank.FEATURES), torch.randint(start_rank.CLASSES, (count,))

    def __len__(self) -> int:
        return len(self.y)

    def fetch(self, indices):  # type: ignore[no-untyped-def]
        picked = torch.from_numpy(indices)
        return self.x[picked], self.y[picked]


class Start:
    """`what` is allreduce or step. The process group is up when the model is asked for."""

    def __init__(self, what: str = "allreduce") -> None:
        self.what = what

    def model(self) -> nn.Module:
        start_rank.NOTED.update(process=_host_running(), torch=_forked())
        start_rank.note("group")
        if self.what == "allreduce":
            dist.all_reduce(torch.ones(1))
            self._done()
        else:
            register_optimizer_step_post_hook(lambda optimizer, arguments, options: self._done())
        return nn.Sequential(
            nn.Linear(start_rank.FEATURES, start_rank.HIDDEN),
            nn.ReLU(),
            nn.Linear(start_rank.HIDDEN, start_rank.CLASSES),
        )

    def train_data(self) -> Samples:
        return Samples()

    def loss(self, model: nn.Module, batch):  # type: ignore[no-untyped-def]
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)

    def _done(self) -> None:
        start_rank.note("done")
        start_rank.write(dist.get_rank())


def _host_running() -> float:
    """When the process that forks the ranks ran its first lines: it wrote the time down in wall-clock seconds."""
    attempt = Path(os.environ["DDP_RUN_FOLDER"]) / "attempts" / f"{int(os.environ['DDP_ATTEMPT']):04d}"
    started = float(json.loads((attempt / "host.json").read_text())["started"])
    return time.monotonic() - (time.time() - started)


def _forked() -> float:
    """When this rank was forked, torch being imported by then; the kernel keeps it to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age
