"""Proves how answers of Slurm's commands are read, with stand-ins for what a real one cannot be brought to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import slurm
from launcher.errors import SchedulerUnreachable, SubmissionError


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def _command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("answer", ["4711", "4711;cluster"])
def test_the_job_id_of_a_submission(commands: Path, answer: str) -> None:
    _command(commands, "sbatch", f"echo '{answer}'")
    assert slurm.sbatch(Path("x.sh")) == "4711"


@pytest.mark.parametrize(
    "stderr",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: fatal: Could not establish a configuration source",
        "sbatch: error: fetch_config: DNS SRV lookup failed\nsbatch: fatal: unable to establish config source",
    ],
)
def test_a_controller_that_does_not_answer_is_no_refusal(commands: Path, stderr: str) -> None:
    _command(commands, "sbatch", f"printf '%s\\n' '{stderr}' >&2; exit 1")
    with pytest.raises(SchedulerUnreachable, match="nothing was submitted"):
        slurm.sbatch(Path("x.sh"))


def test_a_refusal_is_passed_on_in_slurms_words(commands: Path) -> None:
    _command(commands, "sbatch", "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    with pytest.raises(SubmissionError, match=r"refused the job: invalid partition specified: nope"):
        slurm.sbatch(Path("x.sh"))


def test_an_answer_without_a_job_id(commands: Path) -> None:
    _command(commands, "sbatch", "echo welcome to our cluster")
    with pytest.raises(SubmissionError, match="holds no job id"):
        slurm.sbatch(Path("x.sh"))


def test_a_machine_without_slurm(commands: Path) -> None:
    assert not slurm.available()
    with pytest.raises(SubmissionError, match="executor=local"):
        slurm.sbatch(commands / "x.sh")


def test_a_command_that_hangs_is_left(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "SUBMIT_TIMEOUT_S", 0.2)
    _command(commands, "sbatch", "exec /bin/sleep 30")
    with pytest.raises(SchedulerUnreachable, match="squeue --me"):
        slurm.sbatch(Path("x.sh"))


def test_the_state_of_a_job_that_squeue_forgot_comes_from_sacct(commands: Path) -> None:
    _command(commands, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    _command(commands, "sacct", "echo 'CANCELLED by 1000|n[1-2]'")
    state = slurm.job_state("7")
    assert (state.state, state.nodes, state.ended) == ("CANCELLED", "n[1-2]", True)


def test_without_accounting_a_forgotten_job_is_unknown(commands: Path) -> None:
    _command(commands, "squeue", "exit 0")
    assert slurm.job_state("7").state == "UNKNOWN"


def test_a_pending_job_tells_its_reason(commands: Path) -> None:
    _command(commands, "squeue", "echo 'PENDING|Resources|'")
    state = slurm.job_state("7")
    assert (state.state, state.reason, state.ended) == ("PENDING", "Resources", False)
