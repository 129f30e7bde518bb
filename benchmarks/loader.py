"""Samples per second of the loader on this machine, beside bare numpy loops over the same memory-mapped file.

Token rows are of 2 KB each; records of 200 to 4,000 bytes, found by a table of offsets, and put end to end. Both are
read in a shuffled order. The bare loops take samples one by one, or pick a batch in one go as our data sets do. Run it
on an idle machine: figures taken under load are figures of the load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import ROOT, in_turn, ratios, scratch_folder, table

sys.path.insert(0, str(ROOT))

from training.config import DataConfig
from training.loader import Loader
from training.order import Order, Slots
from training.schedule import BatchPlan

ROW_TOKENS = 1024
"""Of two bytes each."""
BARE, GATHERED = "bare numpy, one by one", "bare numpy, by batch"
WORKERS = {"ours": 0, "ours, 2 workers": 2}
BUDGET = 0.8
"""Least share of the rate one by one, without workers. With 2 workers no less than without, within _NOISE."""
_NOISE = 0.9


class Rows:
    """Token rows of one length."""

    def __init__(self, folder: Path, samples: int) -> None:
        path = folder / "rows"
        if not path.exists():
            rng = np.random.default_rng(0)
            rng.integers(0, 50_000, (samples, ROW_TOKENS), dtype=np.uint16).tofile(path)
        self.rows = np.memmap(path, np.uint16, "r", shape=(samples, ROW_TOKENS))

    def __len__(self) -> int:
        return len(self.rows)

    def read_each(self, indices: Any) -> Any:
        return np.stack([self.rows[index] for index in indices])

    def read(self, indices: Any) -> Any:
        return self.rows[indices]

    def fetch(self, indices: Any) -> Any:
        return torch.from_numpy(self.rows[indices])


class Records:
    """Records of different lengths in one file."""

    def __init__(self, folder: Path, samples: int) -> None:
        path, rng = folder / "records", np.random.default_rng(1)
        self.ends = np.cumsum(rng.integers(200, 4_000, samples))
        self.starts = np.concatenate([[0], self.ends[:-1]])
        if not path.exists():
            rng.integers(0, 256, self.ends[-1], dtype=np.uint8).tofile(path)
        self.data = np.memmap(path, np.uint8, "r").view(np.ndarray)

    def __len__(self) -> int:
        return len(self.ends)

    def read_each(self, indices: Any) -> Any:
        parts = [self.data[self.starts[index] : self.ends[index]] for index in indices]
        return np.concatenate(parts), np.array([len(part) for part in parts])

    def read(self, indices: Any) -> Any:
        starts, ends = self.starts[indices], self.ends[indices]
        parts = [self.data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        return np.concatenate(parts), ends - starts

    def fetch(self, indices: Any) -> Any:
        data, lengths = self.read(indices)
        return torch.from_numpy(data), torch.from_numpy(lengths)


def main() -> int:
    """Measure, print a table for each kind of data and a JSON line; 1 when a budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--samples", type=int, default=200_000, help="samples of a data set (default: 200000)")
    parser.add_argument("--batch", type=int, default=32, help="samples of a batch (default: 32)")
    parser.add_argument("--quick", action="store_true", help="one round of few samples: all works, it proves nothing")
    options = parser.parse_args()
    rounds, samples = (1, 20_000) if options.quick else (options.rounds, options.samples)
    torch.set_num_threads(1)
    figures, kept = {}, True
    with scratch_folder() as scratch:
        for kind in (Rows, Records):
            name = kind.__name__.lower()
            figures[name] = contest(f"{name}, {samples} in batches of {options.batch}", kind(Path(scratch), samples),
                                    options.batch, rounds)  # fmt: skip
            alone, helped = (figures[name][way] for way in WORKERS)
            kept &= alone["to_bare"] >= BUDGET and helped["per_s"] >= _NOISE * alone["per_s"]
    verdict = "kept" if kept else "NOT kept"
    print(f"budget: at least {BUDGET} of one by one, with 2 workers no less than without (within 10%): {verdict}")
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2), "torch": torch.__version__}
    facts = {"samples": samples, "batch": options.batch, "budget": BUDGET, "kept": kept, **figures}
    print("\n" + json.dumps({"benchmark": "loader", "rounds": rounds, "machine": machine, **facts}))
    return int(not kept)


def contest(title: str, data: Any, batch: int, rounds: int) -> dict[str, dict[str, float]]:
    """Samples per second of each way, and its ratio to the bare loop's in the same round."""
    ways: dict[str, Callable[[], float]] = {
        BARE: partial(timed, len(data), partial(bare, data.read_each, len(data), batch)),
        GATHERED: partial(timed, len(data), partial(bare, data.read, len(data), batch)),
    }
    loaders = {way: Loader(data, DataConfig(workers=count), torch.device("cpu")) for way, count in WORKERS.items()}
    for way, loader in loaders.items():
        ways[way] = partial(timed, len(data), partial(ours, loader, batch))
    results, _ = in_turn(ways, rounds)
    to_bare, to_gathered = ratios(results, BARE), ratios(results, GATHERED)
    figures = {
        way: {
            "per_s": round(statistics.median(values)),
            "least": round(min(values)),
            "most": round(max(values)),
            "to_bare": round(to_bare[way], 3),
            "to_by_batch": round(to_gathered[way], 3),
        }
        for way, values in results.items()
    }
    head = ["way", "samples/s", "least", "most", "to one by one", "to by batch"]
    table(title, head, [[way, *map(str, values.values())] for way, values in figures.items()])
    return figures


def timed(samples: int, epoch: Callable[[], Iterator[Any]]) -> float:
    """Samples per second of one epoch."""
    start = time.perf_counter()
    for _ in epoch():
        pass
    return samples / (time.perf_counter() - start)


def bare(read: Callable[[Any], Any], samples: int, batch: int) -> Iterator[Any]:
    """What one would write: a shuffled list of all indices, cut into batches."""
    order = np.random.default_rng(0).permutation(samples)
    for start in range(0, samples, batch):
        yield read(order[start : start + batch])


def ours(loader: Loader, batch: int) -> Iterator[Any]:
    """The loader of a run of one rank."""
    slots = Slots(Order(len(loader.dataset), 0), BatchPlan(batch, 1, 1), 0)
    return loader.steps(slots, 0, slots.epoch_steps)


if __name__ == "__main__":
    sys.exit(main())
