"""The contestants of benchmarks/checkpoint.py, a rank each, under torchrun: `checkpoint_ranks.py WAY FOLDER RESULT N`.

A state of N float32 parameters with AdamW's two moments (12 N bytes), alike on all ranks, is saved twice; the second
save counts, since memory is reused then. Before it, and while it is written, a rank takes steps of a fixed amount of
work, as training would.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from training.buffers import Buffers
from training.checkpoint import Checkpoints
from training.config import RunConfig, TrainConfig
from training.ranks import Ranks
from training.shelf import Keep
from training.tensorfile import raw_bytes

WIDTH = 2048
QUIET_STEPS = 60
CHUNK = 16 * 1024 * 1024


class State:
    """A model and its optimizer, all of it filled: what a run has after some steps."""

    def __init__(self, parameters: int) -> None:
        torch.manual_seed(0)
        count = max(1, round(parameters / WIDTH**2))
        self.model = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(count)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            moments = {name: torch.randn_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(7.0), **moments}

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {f"model/{i}": p.detach() for i, p in enumerate(self.model.parameters())}
        for i, parameter in enumerate(self.model.parameters()):
            named.update({f"optimizer/{i}/{k}": v for k, v in self.optimizer.state[parameter].items()})
        return named

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


class Steps:
    """A fixed amount of work on one core, timed."""

    def __init__(self) -> None:
        self._a, self._b = torch.randn(384, 384), torch.randn(384, 384)
        self.seconds: list[float] = []

    def take(self) -> None:
        began = time.perf_counter()
        for _ in range(8):
            torch.mm(self._a, self._b)
        self.seconds.append(time.perf_counter() - began)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


Saved = tuple[Callable[[], bool], Callable[[], None]]
"""What a save leaves: whether it has ended, and how to wait for it."""


def ours(state: State, folder: Path, ranks: Ranks) -> tuple[Callable[[], Saved], Callable[[], None]]:
    store = Checkpoints(str(folder), Keep(1), ranks)
    config = RunConfig(name="bench", train=TrainConfig(task="synthetic"))
    step = [0]

    def save() -> Saved:
        step[0] += 1
        store.begin(step[0], step[0], state.model, state.optimizer, config)
        thread = store._thread
        assert thread is not None
        return (lambda: not thread.is_alive()), store.finish

    def load() -> None:
        found = store.newest()
        assert found is not None
        store.load(found, state.model, state.optimizer)

    return save, load


def torch_save(state: State, folder: Path, ranks: Ranks) -> tuple[Callable[[], Saved], Callable[[], None]]:
    path = folder / "all.pt"

    def save() -> Saved:
        if ranks.rank == 0:
            with path.open("wb") as out:
                torch.save({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}, out)
                out.flush()
                os.fsync(out.fileno())
        if ranks.world_size > 1:
            dist.barrier()
        return (lambda: True), (lambda: None)

    def load() -> None:
        whole = torch.load(path, weights_only=True)
        state.model.load_state_dict(whole["model"])
        state.optimizer.load_state_dict(whole["optimizer"])

    return save, load


def safetensors_alone(state: State, folder: Path, ranks: Ranks) -> tuple[Callable[[], Saved], Callable[[], None]]:
    path = folder / "all.safetensors"

    def save() -> Saved:
        if ranks.rank == 0:
            save_file(state.tensors(), path)
            with path.open("rb") as written:
                os.fsync(written.fileno())
        if ranks.world_size > 1:
            dist.barrier()
        return (lambda: True), (lambda: None)

    def load() -> None:
        whole, now = load_file(path), state.tensors()
        for name, tensor in whole.items():
            now[name].copy_(tensor)

    return save, load


def dcp_ways(asynchronous: bool) -> Any:
    def way(state: State, folder: Path, ranks: Ranks) -> tuple[Callable[[], Saved], Callable[[], None]]:
        place = [0]

        def save() -> Saved:
            place[0] += 1
            at = str(folder / f"dcp-{place[0]}")
            if not asynchronous:
                dcp.save(state.tensors(), checkpoint_id=at)
                return (lambda: True), (lambda: None)
            future: Any = dcp.async_save(state.tensors(), checkpoint_id=at)
            return future.done, (lambda: future.result())

        def load() -> None:
            dcp.load(state.tensors(), checkpoint_id=str(folder / f"dcp-{place[0]}"))

        return save, load

    return way


WAYS = {
    "ours": ours,
    "torch.save": torch_save,
    "safetensors": safetensors_alone,
    "dcp.save": dcp_ways(False),
    "dcp.async_save": dcp_ways(True),
}


def limits(state: State, folder: Path, ranks: Ranks) -> dict[str, float]:
    """Seconds of a plain copy of each rank's part, all at once, into memory that is there, and into fresh memory; and
    of a plain write of all by rank 0, with fsync."""
    tensors, buffers = state.tensors(), Buffers()
    part = {"part": dict(list(tensors.items())[ranks.rank :: ranks.world_size])}
    buffers.reserve(part)
    warm = []
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        buffers.copy(part)
        warm.append(time.perf_counter() - began)
    dist.barrier()
    began = time.perf_counter()
    fresh = [tensor.clone() for tensor in part["part"].values()]
    cold = time.perf_counter() - began
    del fresh
    written: list[float] = []
    if ranks.rank:
        return {}
    for number in range(4):  # as a save does: a new file while the one before it is still there
        began = time.perf_counter()
        descriptor = os.open(folder / f"plain-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for tensor in tensors.values():
            left = memoryview(raw_bytes(tensor))
            while left:
                left = left[os.write(descriptor, left[:CHUNK]) :]
        os.fsync(descriptor)
        os.close(descriptor)
        written.append(time.perf_counter() - began)
        (folder / f"plain-{number - 1}").unlink(missing_ok=True)
    return {"copy_s": statistics.median(warm[1:]), "fresh_copy_s": cold, "write_s": statistics.median(written[1:])}


def measure(way: str, state: State, folder: Path, ranks: Ranks) -> dict[str, float]:
    save, load = WAYS[way](state, folder, ranks)
    _, wait = save()
    wait()
    steps = Steps()
    for _ in range(QUIET_STEPS):
        steps.take()
    quiet = statistics.median(steps.seconds[10:])
    steps.seconds.clear()
    if ranks.world_size > 1:
        dist.barrier()
    began = time.perf_counter()
    ended, wait = save()
    stall = time.perf_counter() - began
    while not ended():
        steps.take()
    wait()
    total = time.perf_counter() - began
    busy = statistics.fmean(steps.seconds) if steps.seconds else quiet
    peak = peak_mb()
    began = time.perf_counter()
    load()
    return {
        "stall_s": stall,
        "total_s": total,
        "inflation": busy / quiet,
        "load_s": time.perf_counter() - began,
        "peak_mb": peak,
    }


def main(way: str, folder: str, result: str, parameters: str) -> None:
    """Run one contestant; rank 0 leaves its figures in the file `result`."""
    torch.set_num_threads(1)
    ranks = Ranks.from_environment(os.environ)
    dist.init_process_group("gloo")
    state = State(int(parameters))
    place = Path(folder)
    if ranks.rank == 0:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    dist.barrier()
    figures = limits(state, place, ranks) if way == "limits" else measure(way, state, place, ranks)
    if ranks.rank == 0:
        Path(result).write_text(json.dumps({**figures, "bytes": state.bytes}))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
