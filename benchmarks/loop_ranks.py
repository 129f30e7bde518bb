"""The peers of benchmarks/loop.py, one rank each, under torchrun: `loop_ranks.py WAY DATA WARM_UP STEPS RESULT`.

Each is written as its own documentation recommends, with logging, checkpoints and progress off. All use AdamW's fused
kernel and DDP's gradients as views of its buckets: the fast settings, which our loop uses too. A way that ends in
`+gathers` gets its batches from the same precomputed gathers as the hand-written loop; the others use DataLoader with a
DistributedSampler.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from loop_common import MICRO_BATCH, PEAK_LR, Clock, Gathers, lr_factor, source, tensors, total_steps
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass(frozen=True)
class Contest:
    """What a contestant is given."""

    data: str
    gathers: bool
    total: int
    clock: Clock
    rank: int
    world_size: int

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        model: torch.nn.Module = source(self.data).model()
        return model

    def epoch(self, sampled_by_framework: bool = False) -> Any:
        """The batches of an epoch: precomputed gathers, or a DataLoader; some frameworks add the sampler themselves."""
        features, classes = tensors(source(self.data))
        if self.gathers:
            return Gathers(features, classes, self.rank, self.world_size)
        dataset = TensorDataset(features, classes)
        if sampled_by_framework:
            return DataLoader(dataset, batch_size=MICRO_BATCH, shuffle=True, drop_last=True)
        sampler: Any = DistributedSampler(dataset, self.world_size, self.rank, drop_last=True)
        return DataLoader(dataset, batch_size=MICRO_BATCH, sampler=sampler, drop_last=True)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.0, fused=True)


def forever(epoch: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch, each in an order of its own."""
    number = 0
    while True:
        if isinstance(epoch, DataLoader) and hasattr(epoch.sampler, "set_epoch"):
            epoch.sampler.set_epoch(number)
        yield from epoch
        number += 1


def hand_written(contest: Contest) -> None:
    """The loop that a careful user writes: nothing in it that a step does not need."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(contest.model(), gradient_as_bucket_view=True)
    optimizer = adamw(model)
    for step, (x, y) in zip(range(contest.total), forever(contest.epoch()), strict=False):
        contest.clock.tick()
        lr = PEAK_LR * lr_factor(step, contest.total)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def lightning_trainer(contest: Contest) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = contest.model()

        def training_step(self, batch: Any) -> torch.Tensor:
            contest.clock.tick()
            x, y = batch
            return F.cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self.model)
            scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, contest.total))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=contest.world_size,
        strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
        max_steps=contest.total,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), contest.epoch(sampled_by_framework=True))


def lightning_fabric(contest: Contest) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    fabric = Fabric(accelerator="cpu", devices=contest.world_size, strategy=strategy)
    fabric.launch()
    bare = contest.model()
    model, optimizer = fabric.setup(bare, adamw(bare))
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, contest.total))
    epoch = contest.epoch(sampled_by_framework=True)
    if not contest.gathers:
        epoch = fabric.setup_dataloaders(epoch)
    for _, (x, y) in zip(range(contest.total), forever(epoch), strict=False):
        contest.clock.tick()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        scheduler.step()


def accelerate(contest: Contest) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    bare = contest.model()
    optimizer = adamw(bare)
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, contest.total))
    model, optimizer, scheduler = accelerator.prepare(bare, optimizer, scheduler)
    epoch = contest.epoch(sampled_by_framework=True)
    if not contest.gathers:
        epoch = accelerator.prepare(epoch)
    for _, (x, y) in zip(range(contest.total), forever(epoch), strict=False):
        contest.clock.tick()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()


WAYS = {
    "hand-written": hand_written,
    "lightning": lightning_trainer,
    "fabric": lightning_fabric,
    "accelerate": accelerate,
}


def main(way: str, data: str, warm_up: str, steps: str, result: str) -> None:
    """Run one contestant; rank 0 leaves its time per step in the file `result`."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name, _, fed = way.partition("+")
    clock = Clock(int(warm_up), int(steps), result, rank)
    WAYS[name](Contest(data, fed == "gathers", total_steps(int(warm_up), int(steps)), clock, rank, world_size))
    dist.barrier()
    # Without clean-up: gloo's threads may still hold Python objects of the last all-reduce, and then abort in the
    # interpreter's end, or wait for ever for the lock that their joiner holds. What counts was written before.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
