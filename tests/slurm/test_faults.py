"""What goes wrong on purpose, on the real thing, about 100 s: pytest tests/slurm/test_faults.py"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.clusterfix import Cluster, call
from tests.slurm.probes import runs, status, wait

pytestmark = pytest.mark.cluster

HARD_KILL_SECONDS = 60  # GraceTime is enforced in a check that runs every 30 s


def test_a_preempted_job_is_warned_requeued_and_runs_again(own: Cluster, tmp_path: Path) -> None:
    script = "trap 'echo warned' USR2; echo run $SLURM_RESTART_COUNT; for i in $(seq 600); do sleep 0.2; done"
    log = tmp_path / "log"
    asked = ("--nodes=2", "--requeue", "--signal=B:USR2@60", f"--output={log}", "--open-mode=append")
    job = own.submit(script, *asked)
    wait("first run", lambda: log.exists() and "run" in log.read_text())
    urgent = own.command("preempt", job).strip()
    wait("warning", lambda: "warned" in log.read_text())
    own.wait_for_job(urgent, "COMPLETED", timeout_seconds=HARD_KILL_SECONDS)
    assert own.wait_for_job(job, "PENDING", "RUNNING")
    wait("second run", lambda: "run 1" in log.read_text(), 40)
    own.run("scancel", job)


def test_only_a_running_job_can_be_preempted(own: Cluster) -> None:
    done = call(own.home, "preempt", "999999")
    assert done.returncode == 1
    assert "999999" in done.stderr


def test_a_killed_node_loses_its_processes_and_its_job_runs_again_after_revival(own: Cluster, tmp_path: Path) -> None:
    log, victim = tmp_path / "log", own.nodes[2]
    script = "echo run $SLURM_RESTART_COUNT $$; exec sleep 300"
    job = own.submit(script, f"--nodelist={victim}", "--requeue", f"--output={log}", "--open-mode=append")
    wait("first run", lambda: log.exists() and bool(log.read_text()))
    pid = int(log.read_text().split()[-1])
    assert runs(pid)
    own.command("kill-node", victim)
    assert not runs(pid)
    assert status()["daemons"][f"slurmd-{victim}"] == "dead"
    wait("the controller's notice", lambda: status()["nodes"][victim].startswith("down"), 60)
    own.command("revive-node", victim)
    assert status()["daemons"][f"slurmd-{victim}"] == "running"
    wait("second run", lambda: "run 1" in log.read_text(), 60)
    own.run("scancel", job)


def test_a_cut_node_is_unreachable_and_comes_back_when_healed(own: Cluster) -> None:
    victim = own.nodes[1]
    connect = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"
    port = next(line for line in own.slurm_conf.read_text().splitlines() if line.startswith("SlurmdPort=")).partition(
        "="
    )[2]
    reach = ("/usr/bin/python3", "-c", connect, victim, port)
    assert subprocess.run(reach, capture_output=True, check=False).returncode == 0
    own.command("cut", victim)
    assert subprocess.run(reach, capture_output=True, check=False).returncode != 0
    assert status()["cut"] == [victim]
    own.command("heal", victim)
    assert status()["healthy"]
    assert own.run("srun", f"--nodelist={victim}", "hostname").strip() == victim


def test_a_paused_controller_answers_nothing_until_resumed(own: Cluster) -> None:
    own.command("pause")
    assert status()["daemons"]["slurmctld"] == "stopped"
    with pytest.raises(subprocess.TimeoutExpired):
        own.run("squeue", timeout_seconds=2)
    own.command("resume")
    assert status()["healthy"]
    own.run("squeue")


def test_jobs_outlive_a_restart_of_the_controller(own: Cluster) -> None:
    job = own.submit("sleep 60")
    own.wait_for_job(job, "RUNNING")
    own.command("restart-controller")
    assert own.job_state(job) == "RUNNING"
    own.run("scancel", job)
