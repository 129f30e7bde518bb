"""Proves what a drill's certificate says, and which exit code follows.

python -m pytest tests/launcher/test_drill_certificate.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.drill.certificate import Certificate, kind, told
from launcher.drill.runs import Met
from launcher.verify.report import Check
from training.rehearsal import Fault


def met(fault: Fault, step: int | None = None, rank: int = 1, point: str = "") -> Met:
    happened: dict[str, Any] = {"attempt": 2, "step": step, "rank": rank, "point": point}
    return Met(fault, None if step is None else happened)


def certificate(*checks: Check, whole: bool = True) -> Certificate:
    found = Certificate(["drill    t-drill-abcd"], "launch drill t.yaml --seed 1", {"seed": 1})
    found.checks, found.whole = list(checks), whole
    return found


@pytest.mark.parametrize(
    ("fault", "row", "words"),
    [
        (Fault(1, "rank", "step", 37, 3), (37, 1, ""), "SIGKILL of rank 1 in step 37"),
        (Fault(1, "rank", "save", 20, 3), (30, 0, "publish x"), "SIGKILL of rank 0 in the save of step 30 (publish x)"),
        (
            Fault(1, "all", "save", 20, 0),
            (20, 0, "flush"),
            "SIGKILL of all ranks in the save of step 20 (rank 0: flush)",
        ),
        (Fault(1, "host", "step", 5, 0), (6, 0, ""), "SIGKILL of the host process in step 6"),
        (Fault(1, "stop", "step", 5, 0), (5, 0, ""), "clean stop (SIGTERM) in step 5"),
        (Fault(1, "full", "save", 5, 0), (5, 1, "make y"), "disk full in the save of step 5 (rank 1: make y)"),
        (Fault(1, "stop", "step", 5, 0), (None,), "clean stop (SIGTERM) in step 5 was planned, and did not happen"),
    ],
)
def test_a_fault_is_told_as_it_happened_not_as_it_was_planned(fault: Fault, row: Any, words: str) -> None:
    assert told(met(fault, *row)) == words


def test_a_full_disk_is_of_two_kinds() -> None:
    assert kind(Fault(1, "full", "save", 5, 0)) == "disk full, the first try of a save"
    assert kind(Fault(1, "full", "save", 5, 0, whole=True)) == "disk full, all tries of a save"


def test_what_was_planned_and_not_met_is_told_and_not_counted(tmp_path: Path) -> None:
    found = certificate(Check("repeatable", "120 losses are equal"), Check("other ranks", unknown="not tried: too few"))
    kill, host = Fault(1, "rank", "step", 3, 0), Fault(2, "host", "step", 9, 0)
    found.met["same-ranks"] = [met(kill, 3), met(kill, 4), met(host)]
    *lines, cost, verdict, again = found.lines()
    assert lines == [
        "drill    t-drill-abcd",
        "what was tried                          planned  happened",
        "SIGKILL of one rank, in a step                2         2",
        "SIGKILL of the host process, in a step        1         0",
        "     SIGKILL of the host process in step 9 was planned, and did not happen",
        "ok   repeatable   120 losses are equal",
        "--   other ranks  not tried: too few",
    ]
    assert cost.startswith("cost     0 attempts, 0 steps trained twice, 0 saves broken off")
    assert (verdict, again) == ("verdict  everything that was tried held", "again    launch drill t.yaml --seed 1")
    assert found.exit_code == 0
    found.write(tmp_path)
    assert (tmp_path / "certificate.txt").read_text().splitlines()[5:] == found.lines()[5:]
    kept = json.loads((tmp_path / "certificate.json").read_text())
    assert (kept["seed"], kept["exit_code"], kept["command"]) == (1, 0, "launch drill t.yaml --seed 1")
    assert [fault["happened"] is not None for fault in kept["faults"]] == [True, True, False]
    assert kept["checks"][1]["holds"] is True


def test_one_check_that_does_not_hold_decides(tmp_path: Path) -> None:
    found = certificate(Check("repeatable", "good"), Check("same ranks", "good", faults=["step 9: loss is 1 in calm"]))
    assert found.exit_code == 5
    assert found.lines() == [
        "drill    t-drill-abcd",
        "ok   repeatable   good",
        "BAD  same ranks   step 9: loss is 1 in calm",
        "verdict  it does not hold: see the line that begins with BAD",
        "again    launch drill t.yaml --seed 1",
    ]


def test_what_was_interrupted_is_no_certificate() -> None:
    found = certificate(Check("repeatable", "good"), whole=False)
    assert found.exit_code == 5
    assert "verdict  interrupted: what is above held so far" in found.lines()
