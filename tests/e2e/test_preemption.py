"""Proves that a preempted job saves, is started again by Slurm, and goes on where it was.

python -m pytest tests/e2e/test_preemption.py
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusterfix import Cluster, private_cluster

from .conftest import Launch, environment

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def quick_requeue() -> Iterator[Cluster]:
    """A cluster whose requeued jobs wait 5 s, not Slurm's 120, and which warns before it preempts."""
    home = Path("/var/tmp/ddp-launcher-requeue")
    options = ("--node-prefix=q", "--cluster-name=requeue", "--nodes=2", "--requeue-delay=5", "--grace-time=20")
    with private_cluster(home, *options) as cluster:
        yield cluster


def _attempts(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]


def _wait_for_steps(run: Path, attempt: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists():
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            if any(line["attempt"] == attempt for line in lines):
                return
        time.sleep(0.2)
    raise AssertionError(f"attempt {attempt} made no step within 90 s")


def _submitted(user: Path, launch: Launch, cluster: Cluster, *arguments: str) -> tuple[str, Path]:
    text = (user / "spec.yaml").read_text().replace("executor: local", "executor: slurm")
    (user / "spec.yaml").write_text(text.replace("nodes: 1", "nodes: 2"))
    env = environment(SLURM_CONF=str(cluster.slurm_conf))
    done = launch(user, "spec.yaml", "train.options.pause=0.05", *arguments, env=env)
    assert done.returncode == 0, done.stderr
    (run,) = (user / "runs").iterdir()
    return done.stdout.split(" job ")[1].split()[0], run


def test_a_preempted_job_comes_back_and_goes_on(user: Path, launch: Launch, quick_requeue: Cluster) -> None:
    job, run = _submitted(user, launch, quick_requeue, "train.steps=400")
    _wait_for_steps(run, 1)
    quick_requeue.command("preempt", job, "--hold", "1")
    assert quick_requeue.wait_for_job(job, "COMPLETED", timeout_seconds=150) == "COMPLETED"
    first, second = _attempts(run)
    assert (first["cause"], second["cause"], second["last_step"]) == ("stopped", "done", 400)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    made = [line["step"] for line in steps if line["kind"] == "train"]
    assert made == list(range(1, 401))  # none lost, none twice


def test_a_cancelled_job_stays_away(user: Path, launch: Launch, quick_requeue: Cluster) -> None:
    job, run = _submitted(user, launch, quick_requeue, "train.steps=40000")
    _wait_for_steps(run, 1)
    env = environment(SLURM_CONF=str(quick_requeue.slurm_conf))
    subprocess.run(["scancel", job], env=env, check=True, timeout=30)
    quick_requeue.wait_for_job(job, "CANCELLED", timeout_seconds=60)
    time.sleep(8)  # longer than a requeued job waits on this cluster
    assert quick_requeue.job_state(job) == "CANCELLED"
    assert not (run / "attempts" / "0002").exists()
