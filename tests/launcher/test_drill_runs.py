"""Proves that a disturbed run is resumed until its end, and that an end for no fault of the plan's is told.

`launch` is stood in for by a function that does to a run folder what an attempt would.

python -m pytest tests/launcher/test_drill_runs.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from launcher.drill import child
from launcher.drill.child import Ended, Interrupts
from launcher.drill.runs import Met, Run, disturbed, undisturbed
from launcher.errors import LaunchError
from training.rehearsal import Fault
from training.runfolder import append_json, write_json

SPEC = "name: t\ntrain: {task: synthetic, steps: 9, batch: {per_rank: 1}}\n"
KILL, LATER = Fault(1, "rank", "step", 4, 1), Fault(3, "host", "save", 8, 0, 3)
FULL, STOP = Fault(2, "full", "save", 4, 0, 5, whole=True), Fault(1, "stop", "step", 3, 0)
Attempt = Callable[["Played"], int]


class Played:
    """What the next attempt of the run does."""

    def __init__(self, run: Run, faults: list[Fault], arguments: list[str]) -> None:
        self.run, self.faults, self.arguments = run, faults, arguments
        self.number = run.attempts + 1

    def strike(self) -> None:
        """All of its faults happen."""
        for fault in self.faults:
            append_json(
                self.run.record,
                {"number": fault.number, "attempt": self.number, "step": fault.step, "rank": fault.rank, "point": ""},
            )

    def train(self, first: int, last: int) -> None:
        """It goes on from step `first` and logs each one up to `last`."""
        place = self.run.folder.attempt(self.number)
        place.path.mkdir(parents=True)
        write_json(place.began, {"step": first})
        for step in range(first + 1, last + 1):
            line = {"attempt": self.number, "time": 0, "step": step, "samples": step, "kind": "train"}
            append_json(self.run.folder.metrics, line)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path, ["spec.yaml"], Interrupts())


@pytest.fixture
def play(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """play(attempt, ...): what each `launch` does; the arguments that they are called with."""
    seen: list[list[str]] = []

    def stand_in(*attempts: Attempt) -> list[list[str]]:
        coming = iter(attempts)

        def launch(
            arguments: list[str], log: Path, record: Path, asked: Interrupts, faults: Iterable[Fault], limit: Any
        ) -> Ended:
            seen.append(arguments)
            folder = run.home / "t-abcd"
            folder.mkdir(exist_ok=True)
            (folder / "spec.yaml").write_text(SPEC)
            return Ended(next(coming)(Played(run, list(faults), arguments)), 2.0)

        monkeypatch.setattr(child, "launch", launch)
        return seen

    return stand_in


def killed(first: int, last: int, code: int = 5, *, save: int | None = None) -> Attempt:
    def attempt(played: Played) -> int:
        played.train(first, last)
        played.strike()
        if save is not None:
            whole = played.run.folder.checkpoints / "step-000000002" / "manifest.json"
            whole.parent.mkdir(parents=True, exist_ok=True)
            whole.touch()
            (played.run.folder.checkpoints / f".step-{save:09d}.0a1b.tmp").mkdir(parents=True)
        return code

    return attempt


def ends(code: int, first: int = 0, last: int = 9) -> Attempt:
    def attempt(played: Played) -> int:
        played.train(first, last)
        return code

    return attempt


def through(run: Run, parts: list[list[Fault]], counts: list[int], strict: bool = False) -> list[tuple[int, bool]]:
    """Each fault's number, and whether it happened."""
    return [
        (met.fault.number, met.happened is not None) for part in disturbed(run, parts, counts, strict) for met in part
    ]


def test_each_attempt_meets_its_part_and_the_last_one_is_left_alone(run: Run, play: Any) -> None:
    seen = play(killed(0, 4), killed(2, 8, save=8), ends(0, 6))
    assert through(run, [[KILL], [FULL, LATER]], [2, 2, 2]) == [(1, True), (2, True), (3, True)]
    folder = str(run.home / "t-abcd")
    assert seen == [["spec.yaml"], ["resume", folder], ["resume", folder]]
    assert (run.attempts, run.wall_s, run.ranks) == (3, 6.0, [2, 2, 2])
    assert run.broken == {".step-000000008.0a1b.tmp"}
    assert run.steps_again() == (4 - 2) + (8 - 6)


def test_an_attempt_that_passes_over_the_newest_checkpoint_is_told(run: Run, play: Any) -> None:
    play(killed(0, 4, save=4), killed(2, 8, save=8), ends(0, 0))
    through(run, [[KILL], [LATER]], [2, 2, 2])
    assert run.saved == {1: 2, 2: 2, 3: 2}
    assert run.lost() == ["attempt 3 went on from step 0, though the checkpoint of step 2 was there"]


def test_the_number_of_ranks_is_changed_where_it_has_to_be(run: Run, play: Any) -> None:
    seen = play(killed(0, 4), killed(2, 8), ends(0, 6))
    through(run, [[KILL], [LATER]], [2, 1, 1])
    assert [arguments[2:] for arguments in seen[1:]] == [["resources.nodes=1", "resources.tasks_per_node=1"], []]


def test_faults_that_a_run_was_over_before_did_not_happen(run: Run, play: Any) -> None:
    play(killed(0, 4), ends(0, 4))
    assert through(run, [[KILL], [LATER], [FULL]], [2, 2, 2, 2]) == [(1, True), (3, False), (2, False)]
    assert run.attempts == 2


@pytest.mark.parametrize(
    ("attempts", "parts", "strict", "wrong"),
    [
        ([ends(5)], [[KILL]], False, "attempt 1 failed by itself"),
        ([killed(0, 4), ends(5, 4)], [[KILL]], False, "attempt 2 failed by itself"),
        ([killed(0, 4, 2)], [[FULL]], False, "attempt 1 failed by itself"),
        ([killed(0, 4), killed(2, 9), ends(5)], [[FULL], [KILL]], True, "attempt 3 failed by itself"),
        ([killed(0, 4, 5)], [[STOP]], False, "attempt 1 did not stop cleanly"),
    ],
)
def test_an_end_for_no_fault_of_ours_is_told(
    attempts: list[Attempt], parts: list[list[Fault]], strict: bool, wrong: str, run: Run, play: Any
) -> None:
    play(*attempts)
    with pytest.raises(LaunchError, match=f"^{run.name}: {wrong}: see {run.log}$"):
        through(run, parts, [2] * (len(parts) + 1), strict)


def test_an_undisturbed_run_that_fails_is_told(run: Run, play: Any) -> None:
    play(ends(5))
    with pytest.raises(LaunchError, match="the run failed by itself, undisturbed: see "):
        undisturbed(run, 2)


def test_a_run_that_never_began_is_told(run: Run, play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "launch", lambda *_: Ended(5, 0.1))
    with pytest.raises(LaunchError, match=f"{run.name}: its run folder was not made; see {run.log}"):
        undisturbed(run, 2)


def test_what_was_met_keeps_what_its_rank_wrote_down(run: Run, play: Any) -> None:
    play(killed(0, 4), ends(0, 2))
    (met,), _ = disturbed(run, [[KILL]], [2, 2], False)
    assert met == Met(KILL, {"number": 1, "attempt": 1, "step": 4, "rank": 1, "point": ""})
