"""Proves when saves are due by time and by cost, that rank 0 is asked rarely, and what earlier attempts tell."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from training.config import CheckpointConfig
from training.pace import PRIOR_S, Pace, Slowdown, history, young_daly_s
from training.ranks import Ranks
from training.runfolder import RunFolder


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def saves(pace: Pace, clock: Clock, steps: int, step_s: float, cost_s: float = 0.0) -> tuple[list[float], int]:
    """Seconds at which saves began, and how often rank 0 was asked, over so many steps."""
    asked, decide = [0], pace._decide

    def counted(step: int) -> tuple[bool, int]:
        asked[0] += 1
        return decide(step)

    pace._decide = counted  # type: ignore[method-assign]
    found = []
    for step in range(1, steps + 1):
        clock.now += step_s
        if pace.due(step):
            found.append(clock.now - 100.0)
            pace.began(step)
            pace.cost_s = cost_s
    return found, asked[0]


def test_every_so_many_steps() -> None:
    clock = Clock()
    found, asked = saves(Pace(CheckpointConfig(every_steps=3), Ranks(), 0, clock=clock), clock, 10, 1.0)
    assert (found, asked) == ([3.0, 6.0, 9.0], 0)


@pytest.mark.parametrize("step_s", [0.003, 0.4, 7.0, 90.0])
def test_minutes_are_kept_to_a_step_and_rank_0_is_asked_a_few_times_for_each_save(step_s: float) -> None:
    clock = Clock()
    steps = int(1200 / step_s)
    found, asked = saves(Pace(CheckpointConfig(every_minutes=2), Ranks(), 0, clock=clock), clock, steps, step_s)
    gaps = [b - a for a, b in zip([0.0, *found], found, strict=False)]
    late = 10 * step_s if step_s > 12 else step_s  # the first look is after ten steps
    assert all(abs(gap - max(120.0, step_s)) <= late for gap in gaps[1:])
    assert abs(gaps[0] - 120.0) <= max(late, 10 * step_s)
    assert asked <= len(found) * (math.log2(max(2.0, 120 / step_s)) + 4)


def test_whichever_comes_first() -> None:
    clock = Clock()
    config = CheckpointConfig(every_steps=50, every_minutes=1)
    found, _ = saves(Pace(config, Ranks(), 0, clock=clock), clock, 100, 2.0)
    assert found == [60.0, 100.0, 160.0, 200.0]


def test_auto_saves_as_often_as_cost_and_failures_say() -> None:
    assert young_daly_s(2.0, 3600.0) == 120.0
    clock = Clock()
    pace = Pace(CheckpointConfig(auto=True), Ranks(), 0, ran_s=3600.0, failures=4, clock=clock)
    pace.cost_s = 0.5
    assert pace.interval_s() == pytest.approx(math.sqrt(2 * 0.5 * (PRIOR_S + 3600.0) / 5))
    found, _ = saves(pace, clock, 2000, 1.0, cost_s=0.5)
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert len(gaps) > 5
    assert all(131 <= gap <= 137 for gap in gaps)


def test_what_earlier_attempts_tell(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert history(folder) == (0.0, 0)
    lines = [
        {"attempt": 1, "start": 10.0, "end": 40.0, "cause": "failed"},
        {"attempt": 2, "start": 50.0, "end": 60.0, "cause": "stopped"},
        {"attempt": 3, "start": 60.0, "end": 61.5, "cause": "killed"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    folder.attempts_jsonl.write_text(text + '{"attempt": 4, "sta')
    assert history(folder) == (41.5, 2)


def test_steps_that_a_write_made_slower() -> None:
    slowdown = Slowdown(100, 50.0)
    slowdown.began(110, 51.0)  # 0.1 s a step
    assert slowdown.ended(114, 51.6) == pytest.approx(1.5)
    slowdown.began(124, 53.6)  # 0.2 s a step
    assert slowdown.ended(124, 53.6) is None  # it was waited for
