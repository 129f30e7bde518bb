"""Proves how a drill minds its child: what it hands over, and that it ends it when asked to, or when it takes too long.

python -m pytest tests/launcher/test_drill_child.py
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from launcher.drill import child
from launcher.drill.child import Interrupted, Interrupts
from launcher.errors import LaunchError
from training.rehearsal import VARIABLE, Fault, encode

SHOWS = f"import os, sys; print(sys.argv[1:], os.environ.get({VARIABLE!r})); sys.exit(7)"
PATIENT = """\
import os, signal, sys, time
asked = []
def note(*_):
    asked.append(1)
    os.write(1, b"asked\\n")
signal.signal(signal.SIGINT, note)
os.write(1, b"began\\n")
os.kill(os.getppid(), int(sys.argv[1]))
while len(asked) < int(sys.argv[2]): time.sleep(0.01)
os.write(1, b"ended\\n")
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Python program that stands in for `launch`."""
    text: list[str] = []
    monkeypatch.setattr(child, "door_command", lambda _, *arguments: [sys.executable, "-c", text[0], *arguments])
    return text


def test_the_child_gets_its_arguments_and_its_faults_and_its_words_go_to_the_log(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.append(SHOWS)
    monkeypatch.setenv(VARIABLE, "of an outer drill")
    log, record, fault = tmp_path / "log", tmp_path / "record", Fault(1, "rank", "step", 3, 0)
    assert child.launch(["a", "b=c"], log, record, Interrupts()).exit_code == 7
    assert child.launch([], log, record, Interrupts(), [fault]).exit_code == 7
    assert log.read_text() == f"['a', 'b=c'] None\n[] {encode(record, [fault])}\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_is_passed_on_and_the_child_waited_for(
    number: int, code: int, program: list[str], tmp_path: Path
) -> None:
    program.append(PATIENT)
    log = tmp_path / "log"
    with Interrupts() as asked:
        with pytest.raises(Interrupted):
            child.launch([str(int(number)), "1"], log, tmp_path / "record", asked)
        assert (asked.count, asked.exit_code) == (1, code)
        with pytest.raises(Interrupted):
            child.launch(["0", "0"], log, tmp_path / "record", asked)
    assert log.read_text() == "began\nasked\nended\n"


@pytest.mark.parametrize(("times", "ends"), [(1, True), (2, True), (99, False)])
def test_a_child_that_takes_too_long_is_asked_twice_and_then_killed(
    times: int, ends: bool, program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"

    def clock() -> float:
        """Time goes on only when the child has begun, and has seen what it was asked."""
        said = log.read_text() if log.exists() else ""
        return 100.0 * said.count("began") + 110.0 * said.count("asked")

    monkeypatch.setattr(child.time, "monotonic", clock)
    program.append(PATIENT)
    with pytest.raises(LaunchError, match=r"the run did not end within 50 s, and was stopped; see .*log"):
        child.launch(["0", str(times)], log, tmp_path / "record", Interrupts(), limit_s=50.0)
    said = log.read_text()
    assert said.count("asked") >= min(times, 2)
    assert ("ended" in said) is ends
