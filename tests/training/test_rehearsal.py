"""Proves that a rehearsed fault strikes exactly where its plan says, once, and is on record before it does.

Signals are not sent here but noted; tests/e2e/test_drill.py has the real ones.

python -m pytest tests/training/test_rehearsal.py
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from training import rehearsal
from training.checkpoint import Checkpoints
from training.config import RunConfig, TrainConfig
from training.ranks import Ranks
from training.rehearsal import OF_OTHERS, OF_RANK_0, Fault, encode, rehearse
from training.runfolder import RunFolder, write_json
from training.shelf import Keep
from training.storage import LocalFolder

from .conftest import Gang

CONFIG = RunConfig(name="run", train=TrainConfig(task="synthetic"))
KILLED = signal.SIGKILL


class Counted:
    """A loader whose steps are numbers."""

    def steps(self, slots: None, samples: int, count: int) -> Iterator[int]:
        yield from range(samples, samples + count)


class Attempt:
    """An attempt of a run with one rank, that meets faults."""

    def __init__(self, home: Path, patch: pytest.MonkeyPatch, *faults: Fault, began: int = 0, tries: int = 1) -> None:
        self.folder = RunFolder(home / "run")
        self.attempt = self.folder.take_attempt()
        self.record = home / "faults.jsonl"
        self.signals: list[tuple[int, int]] = []
        self.store = Checkpoints(str(self.folder.checkpoints), Keep(1), Ranks(), (0.0,) * (tries - 1))
        self.model = nn.Linear(3, 3)
        self.optimizer = AdamW(self.model.parameters())
        self.job: Any = SimpleNamespace(loader=Counted(), checkpoints=self.store, ranks=Ranks())
        patch.setenv(rehearsal.VARIABLE, encode(self.record, faults))
        patch.setattr(os, "kill", lambda pid, number: self.signals.append((pid, number)))
        patch.setattr("time.sleep", lambda _: None)
        rehearse(self.job, self.attempt, began)

    def steps(self, count: int) -> list[int]:
        return list(self.job.loader.steps(None, 7, count))

    def save(self, step: int) -> Any:
        """Save, and how it went."""
        self.store.begin(step, 10 * step, self.model, self.optimizer, CONFIG)
        self.store.settle(30)
        (saved,) = self.store.poll()
        return saved

    def happened(self) -> list[tuple[int, int, str]]:
        """Number, step and point of the faults on record."""
        if not self.record.exists():
            return []
        rows = [json.loads(line) for line in self.record.read_text().splitlines()]
        assert {row["attempt"] for row in rows} == {self.attempt.number}
        return [(row["number"], row["step"], row["point"]) for row in rows]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Timers strike at once; how long they would have waited."""
    seconds: list[float] = []

    class Timer:
        daemon = False

        def __init__(self, wait_s: float, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            seconds.append(wait_s)
            self.start = partial(work, *arguments)

    monkeypatch.setattr("threading.Timer", Timer)
    return seconds


def test_a_kill_in_a_step_comes_in_that_step_once(
    waits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1.0, 3.0, 8.0, 9.0, 10.0])  # at each step: the first took 2 seconds, the second, with a save, 5
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    attempt = Attempt(tmp_path, monkeypatch, Fault(1, "rank", "step", 23, 0, share=0.5), began=20)
    assert attempt.steps(5) == [7, 8, 9, 10, 11]
    assert attempt.happened() == [(1, 23, "")]
    assert attempt.signals == [(os.getpid(), KILLED)]
    assert waits == [1.0]


def test_a_kill_whose_thread_comes_too_late_still_comes_in_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.Timer", lambda *_: SimpleNamespace(start=lambda: None))
    faults = (Fault(1, "rank", "step", 23, 0, share=0.9), Fault(2, "rank", "step", 25, 0, share=0.9))
    attempt = Attempt(tmp_path, monkeypatch, *faults, began=20)
    begun = [(number, attempt.happened()) for number in attempt.job.loader.steps(None, 21, 5)]
    assert begun[2:4] == [(23, []), (24, [(1, 23, "")])]
    assert attempt.happened() == [(1, 23, ""), (2, 25, "")]
    assert attempt.signals == [(os.getpid(), KILLED)] * 2


def test_an_attempt_that_begins_beyond_the_point_is_struck_in_its_first_step_or_save(
    waits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = (Fault(1, "rank", "step", 5, 0, share=0.9), Fault(2, "rank", "save", 5, 0, operation=8))
    attempt = Attempt(tmp_path, monkeypatch, *faults, began=20)
    attempt.steps(2)
    attempt.save(22)
    assert attempt.happened() == [(1, 21, ""), (2, 22, "write manifest.json, 0% of its bytes")]
    assert waits == [0.0]


@pytest.mark.parametrize("operation", range(len(OF_RANK_0) + 1))
def test_a_kill_comes_at_each_operation_of_a_save(
    operation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(tmp_path, monkeypatch, Fault(1, "rank", "save", 2, 0, operation, share=0.5))
    attempt.save(1)
    assert attempt.happened() == []
    attempt.save(2)
    ((number, step, point),) = attempt.happened()
    assert (number, step) == (1, 2)
    word = point.split()[0]
    assert ("publish" if word == "hide" else word) == (*OF_RANK_0, "after")[operation]
    assert attempt.signals == [(os.getpid(), KILLED)]


def test_the_operations_that_plans_go_by_are_those_of_a_save(gang: Gang, tmp_path: Path) -> None:
    (_, first), (_, second), (_, third) = gang(3, _operations, str(tmp_path / "c"))
    assert (tuple(first), tuple(second), tuple(third)) == (OF_RANK_0, OF_OTHERS, OF_OTHERS)


def _operations(ranks: Ranks, place: str) -> tuple[int, list[str]]:
    """Operations of the second save, which removes the first."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=ranks.rank, world_size=ranks.world_size)
    seen: list[str] = []
    for kind in {*OF_RANK_0, *OF_OTHERS}:
        real = getattr(LocalFolder, kind)

        def noted(self: LocalFolder, *arguments: Any, kind: str = kind, real: Any = real) -> Any:
            seen.append(kind)
            return real(self, *arguments)

        setattr(LocalFolder, kind, noted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    store = Checkpoints(place, Keep(1), ranks)
    store.save(1, 10, model, optimizer, CONFIG)
    seen.clear()
    store.save(2, 20, model, optimizer, CONFIG)
    return ranks.rank, seen


def test_a_write_that_is_struck_has_left_that_share_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(tmp_path, monkeypatch, Fault(1, "full", "save", 2, 0, operation=5, share=0.25))
    attempt.save(1)
    size = (attempt.folder.checkpoints / "step-000000001" / "model-00000.safetensors").stat().st_size
    kept = tmp_path / "kept"
    monkeypatch.setattr(
        attempt.store.writer.folder, "remove", lambda name: (tmp_path / "run/checkpoints" / name).rename(kept)
    )
    assert attempt.save(2).error is not None
    assert (kept / "model-00000.safetensors").stat().st_size == size // 4
    assert attempt.happened() == [(1, 2, "write model-00000.safetensors, 25% of its bytes")]


def test_a_full_disk_for_one_try_is_got_over_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(tmp_path, monkeypatch, Fault(1, "full", "save", 1, 0, operation=4), tries=2)
    saved = attempt.save(1)
    assert (saved.tries, saved.error) == (2, None)
    assert attempt.store.newest() is not None
    assert attempt.signals == []


def test_a_full_disk_for_all_tries_leaves_that_save_out_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(tmp_path, monkeypatch, Fault(1, "full", "save", 2, 0, operation=4, whole=True), tries=3)
    assert attempt.save(1).error is None
    saved = attempt.save(2)
    assert saved.tries == 3
    assert "No space left on device; free some space, or keep fewer checkpoints" in str(saved.error)
    assert attempt.save(3).error is None
    assert sorted(path.name for path in attempt.folder.checkpoints.iterdir()) == ["step-000000003"]
    assert attempt.happened() == [(1, 2, "write state.json, 0% of its bytes")]


def test_all_ranks_are_killed_at_once_and_the_one_that_does_it_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(tmp_path, monkeypatch, Fault(1, "all", "save", 1, 0, operation=8))
    for rank, pid in ((0, os.getpid()), (1, 1111), (2, 2222)):
        write_json(attempt.attempt.environment(rank), {"pid": pid})
    attempt.save(1)
    assert attempt.signals[-1] == (os.getpid(), KILLED)
    assert sorted(attempt.signals[:-1]) == [(1111, KILLED), (2222, KILLED)]


@pytest.mark.parametrize(("action", "number"), [("host", signal.SIGKILL), ("stop", signal.SIGTERM)])
def test_the_host_process_is_killed_or_asked_to_stop(
    action: Any, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(tmp_path, monkeypatch, Fault(1, action, "save", 1, 0, operation=3, share=0.5))
    attempt.save(1)
    assert attempt.signals == [(os.getppid(), number)]


def test_a_plan_left_in_the_environment_does_nothing_to_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Attempt(tmp_path, monkeypatch, Fault(1, "rank", "save", 1, 0))
    elsewhere = RunFolder(tmp_path.parent / f"{tmp_path.name}-other")
    job = SimpleNamespace(loader=Counted())
    rehearse(job, elsewhere.attempt(1), 0)  # type: ignore[arg-type]
    assert "steps" not in vars(job.loader)
