"""Proves when a job that stopped cleanly is put back into the queue, and when it is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import restart, slurm
from launcher.slurm import JobState
from training.runfolder import RunFolder, append_json


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of jobs that were put back."""
    jobs: list[str] = []
    monkeypatch.setattr(slurm, "requeue", jobs.append)
    monkeypatch.setattr(slurm, "job_state", lambda job: JobState("RUNNING"))
    return jobs


def _run(folder: Path, *steps: int, mode: str = "auto") -> RunFolder:
    run = RunFolder(folder)
    run.spec.write_text(f"name: r\ncommand: [x]\nrestart: {{mode: {mode}}}\n")
    for step in steps:
        append_json(run.attempts_jsonl, {"last_step": step})
    return run


def test_a_clean_stop_is_followed_by_a_requeue(tmp_path: Path, requeued: list[str]) -> None:
    restart.after(_run(tmp_path, 10), "stopped", "7")
    assert requeued == ["7"]


@pytest.mark.parametrize("cause", ["done", "failed", "killed"])
def test_other_ends_are_not(tmp_path: Path, requeued: list[str], cause: str) -> None:
    restart.after(_run(tmp_path, 10), cause, "7")
    assert requeued == []


def test_the_spec_may_forbid_it(tmp_path: Path, requeued: list[str]) -> None:
    restart.after(_run(tmp_path, 10, mode="none"), "stopped", "7")
    assert requeued == []


def test_a_job_that_its_user_cancelled_stays_away(
    tmp_path: Path, requeued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "job_state", lambda job: JobState("COMPLETING"))
    restart.after(_run(tmp_path, 10), "stopped", "7")
    assert requeued == []


def test_four_ends_at_the_same_step_are_enough(tmp_path: Path, requeued: list[str]) -> None:
    restart.after(_run(tmp_path, 10, 20, 20, 20), "stopped", "7")
    assert requeued == ["7"]
    restart.after(_run(tmp_path, 20), "stopped", "7")
    assert requeued == ["7"]
