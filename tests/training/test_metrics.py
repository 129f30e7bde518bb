"""metrics.jsonl is complete, valid JSON line by line, whatever came before; trouble is said once and never raises."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from training.metrics import Metrics, Sink
from training.ranks import Ranks
from training.runfolder import RunFolder

HOME = Path(__file__).parents[2]


class Collected:
    """A sink that keeps what it gets, and fails when told so."""

    def __init__(self, fails: bool = False) -> None:
        self.records: list[Mapping[str, Any]] = []
        self.ended: list[int] = []
        self._fails = fails

    def log(self, record: Mapping[str, Any]) -> None:
        if self._fails:
            raise RuntimeError("no network")
        self.records.append(record)

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


def make(folder: Path, attempt: int = 1, rank: int = 0, sinks: list[Sink] | None = None) -> Metrics:
    return Metrics(RunFolder(folder), Ranks(rank, rank, 2, 2), attempt, sinks or [])


def lines(folder: Path) -> list[dict[str, Any]]:
    def no_constant(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


def test_each_record_is_a_line_with_attempt_time_step_and_samples(tmp_path: Path) -> None:
    metrics = make(tmp_path, attempt=3)
    metrics.write({"step": 1, "samples": 32, "loss": 0.5, "note": "a\nb"})
    (line,) = lines(tmp_path)  # there already: nothing is kept back
    assert list(line) == ["attempt", "time", "step", "samples", "loss", "note"]
    assert (line["attempt"], line["step"], line["samples"], line["loss"], line["note"]) == (3, 1, 32, 0.5, "a\nb")
    metrics.close(0)
    assert (tmp_path / "metrics.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_later_attempt_appends(tmp_path: Path) -> None:
    for attempt in (1, 2):
        metrics = make(tmp_path, attempt)
        metrics.write({"step": 1, "samples": 1})
        metrics.close(0)
    assert [line["attempt"] for line in lines(tmp_path)] == [1, 2]


def test_half_a_line_of_a_killed_attempt_stays_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"attempt": 1}\n{"attempt": 1, "st')
    metrics = make(tmp_path, attempt=2)
    metrics.write({"step": 1, "samples": 1})
    metrics.write({"step": 2, "samples": 2})
    content = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert content[1] == '{"attempt": 1, "st'
    assert [json.loads(line)["step"] for line in content[2:]] == [1, 2]


def test_numbers_that_json_lacks_are_texts_that_float_reads(tmp_path: Path) -> None:
    values = {
        "a": math.nan,
        "b": math.inf,
        "c": [-math.inf, 1.0],
        "d": torch.tensor(math.nan),
        "e": np.float32(0.25),
        "f": torch.tensor([3]),
        "g": {"h": np.float64(math.inf)},
    }
    make(tmp_path).write({"step": 1, "samples": 1, **values})
    (line,) = lines(tmp_path)
    assert {k: line[k] for k in values} == {
        "a": "NaN",
        "b": "Infinity",
        "c": ["-Infinity", 1.0],
        "d": "NaN",
        "e": 0.25,
        "f": 3,
        "g": {"h": "Infinity"},
    }
    assert math.isnan(float(line["a"]))
    assert float(line["c"][0]) == -math.inf


def test_other_ranks_do_nothing(tmp_path: Path) -> None:
    sink = Collected()
    metrics = make(tmp_path, rank=1, sinks=[sink])
    metrics.write({"step": 1, "samples": 1})
    metrics.close(0)
    assert (list(tmp_path.iterdir()), sink.records, sink.ended) == ([], [], [])


def test_a_failing_sink_is_said_once_and_counted_and_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = Collected(), Collected(fails=True)
    metrics = make(tmp_path, sinks=[bad, good])
    for step in (1, 2, 3):
        metrics.write({"step": step, "samples": step})
    metrics.close(5)
    metrics.close(5)
    text = capsys.readouterr().err
    assert text.count("Collected: RuntimeError: no network; training goes on, this is said once") == 1
    assert text.count("3 times a record did not reach Collected") == 1
    assert [record["step"] for record in good.records] == [1, 2, 3]
    assert all(record["attempt"] == 1 and record["time"] > 0 for record in good.records)
    assert good.ended == bad.ended == [5]
    assert len(lines(tmp_path)) == 3


def test_a_full_disk_is_said_once_and_lines_after_it_are_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = make(tmp_path)
    metrics.write({"step": 0, "samples": 0})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))  # the next line is cut after ten bytes
    try:
        metrics.write({"step": 1, "samples": 1})
        metrics.write({"step": 2, "samples": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    metrics.write({"step": 3, "samples": 3})
    metrics.close(0)
    text = capsys.readouterr().err
    assert text.count("this is said once") == 1
    assert f"2 times a record did not reach {tmp_path}/metrics.jsonl" in text
    content = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(content[1]) == 10
    assert [json.loads(content[i])["step"] for i in (0, 2)] == [0, 3]


def test_a_folder_that_is_missing_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = make(tmp_path / "gone")
    metrics.write({"step": 1, "samples": 1})
    metrics.write({"step": 2, "samples": 2})
    metrics.close(0)
    assert capsys.readouterr().err.count("FileNotFoundError") == 1


def test_a_kill_loses_nothing_that_was_written(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from training.metrics import Metrics;"
        "from training.ranks import Ranks; from training.runfolder import RunFolder;"
        "m = Metrics(RunFolder(Path(sys.argv[1])), Ranks(), 1, []);"
        "[m.write({'step': s, 'samples': s}) for s in range(100)];"
        "assert 'torch' not in sys.modules; os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=HOME, timeout=60, env={**os.environ, "PYTHONPATH": str(HOME)}
    )
    assert done.returncode == -9
    assert [line["step"] for line in lines(tmp_path)] == list(range(100))
