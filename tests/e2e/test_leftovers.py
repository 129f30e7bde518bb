"""Proves that a local run takes with it whatever its ranks started, and tells its end to whoever still listens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import LAUNCH, environment


def _spec(folder: Path, script: str, ranks: int = 1, *before: str) -> Path:
    path = folder / "spec.yaml"
    command = json.dumps([*before, "sh", "-c", script])
    path.write_text(f"name: left\nresources: {{tasks_per_node: {ranks}}}\ncommand: {command}\n")
    return path


def _sleepers(seconds: str) -> list[str]:
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            line = (proc / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if line[:2] == [b"sleep", seconds.encode()]:
            found.append(proc.name)
    return found


def _none_left(seconds: str) -> bool:
    deadline = time.monotonic() + 10
    while _sleepers(seconds):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("seconds", "script", "before"),
    [
        ("41001", '[ "$RANK" = 1 ] && exit 3; sleep 41001', ("timeout", "600")),
        ("41002", "setsid sleep 41002 & sleep 0.5; exit 3", ()),
        ("41003", "setsid sleep 41003 & sleep 0.5; exit 0", ()),
    ],
    ids=["a group of its own", "a session of its own", "a session of its own, all well"],
)
def test_nothing_that_a_rank_started_outlives_the_run(
    seconds: str, script: str, before: tuple[str, ...], tmp_path: Path
) -> None:
    spec = _spec(tmp_path, script, 2, *before)
    command = [LAUNCH, spec, "executor=local"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if "exit 0" in script else 5), done.stderr
    assert _none_left(seconds)


def test_a_reader_that_closes_both_streams_ends_the_showing_not_the_run(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "echo a; sleep 1; echo b; sleep 1; exit 7")
    child = subprocess.Popen(
        [LAUNCH, spec, "executor=local"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline()
        child.stdout.close()
        assert child.wait(60) == 5
    (result,) = tmp_path.glob("runs/*/attempts/0001/result.json")
    assert json.loads(result.read_text())["text"] == "ExitCode: sh left with exit code 7"


def _ignoring(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)


def test_a_run_is_told_right_where_the_end_of_children_is_ignored(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "sleep 0.2; exit 3")
    done = subprocess.run(
        [LAUNCH, spec, "executor=local"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: _ignoring(signal.SIGCHLD),
    )
    assert done.returncode == 5
    assert "rank 0 on" in done.stderr
    assert "sh left with exit code 3" in done.stderr


def test_a_signal_that_is_ignored_from_the_start_stays_so_as_nohup_asks(tmp_path: Path) -> None:
    spec = _spec(tmp_path, "echo up; sleep 2; echo done")
    child = subprocess.Popen(
        [LAUNCH, spec, "executor=local"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: _ignoring(signal.SIGHUP),
        start_new_session=True,
    )
    with child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(2)]
        assert lines[1] == "up\n"
        os.killpg(child.pid, signal.SIGHUP)
        assert child.stdout.read() == "done\n"
        assert child.wait(60) == 0


def test_a_rank_that_just_leaves_is_named_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(
        "import os\nfrom torch import nn\nclass Task:\n"
        "    def model(self):\n        os._exit(9)\n    def train_data(self):\n        return [1]\n"
        "    def loss(self, model, batch):\n        pass\n"
    )
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: leaving\ntrain: {task: 'leaving:Task', steps: 3, batch: {per_rank: 1}}\n")
    command = [LAUNCH, spec, "executor=local"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 5
    assert "Exit: left with exit code 9, and said no reason" in done.stderr
