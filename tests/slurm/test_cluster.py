"""The development cluster on the real thing, coming and going: pytest tests/slurm/test_cluster.py

The tests break what they use, so they have a cluster of their own beside whichever one runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from devcluster.layout import Layout

from tests.clusterfix import Cluster, bring_up, call, private_cluster
from tests.slurm.probes import HOME, OPTIONS, PREFIX, daemon_pids, runs, status, wait

pytestmark = pytest.mark.cluster


def test_up_makes_healthy_nodes_and_a_second_up_is_quick_and_changes_nothing(own: Cluster) -> None:
    assert own.nodes == tuple(f"{PREFIX}{number}" for number in (1, 2, 3))
    assert status()["healthy"]
    before = daemon_pids()
    begin = time.monotonic()
    own.command("up", *OPTIONS)
    assert time.monotonic() - begin < 2
    assert daemon_pids() == before


def test_up_with_other_settings_refuses_and_names_the_difference(own: Cluster) -> None:
    done = call(own.home, "up", *OPTIONS, "--gpus=2")
    assert done.returncode == 1
    assert "--gpus 4 -> 2" in done.stderr
    assert "--replace" in done.stderr


def test_a_second_cluster_with_the_same_node_names_is_refused_and_leaves_nothing(own: Cluster) -> None:
    other = Path(f"{own.home}-2")
    done = call(other, "up", *OPTIONS)
    assert done.returncode == 1
    assert "--node-prefix" in done.stderr
    assert not other.exists()


@pytest.mark.parametrize("user", [None, "nobody"])
def test_a_step_runs_on_two_nodes_under_their_names_and_reaches_the_other(own: Cluster, user: str | None) -> None:
    talk = (
        "import os, socket\n"
        "head, me = os.environ['HEAD'], socket.gethostname()\n"
        "if me == head:\n"
        "    print(me, socket.create_server((head, 20123)).accept()[0].recv(99).decode())\n"
        "else:\n"
        "    import time\n"
        "    for _ in range(100):\n"
        "        try:\n"
        "            socket.create_connection((head, 20123)).sendall(me.encode()); break\n"
        "        except ConnectionRefusedError:\n"
        "            time.sleep(0.1)\n"
    )
    pair = own.nodes[:2]
    export = f"--export=ALL,HEAD={pair[0]}"
    command = ("srun", f"--nodelist={','.join(pair)}", "--nodes=2", export, "/usr/bin/python3", "-c", talk)
    assert own.run(*command, user=user).split() == list(pair)


@pytest.mark.parametrize("user", [None, "nobody"])
def test_a_batch_job_is_accounted_for_under_its_user(own: Cluster, user: str | None) -> None:
    job = own.submit("srun hostname", "--nodes=2", user=user)
    own.wait_for_job(job, "COMPLETED")
    columns = ("--allocations", "--noheader", "--parsable2", "--format=State,User,NNodes,ExitCode")
    expected = f"COMPLETED|{user or 'root'}|2|0:0"
    wait("accounting", lambda: own.run("sacct", f"--jobs={job}", *columns, user=user).strip() == expected)


def test_jobs_get_gpus_of_the_asked_type(own: Cluster) -> None:
    asked = own.run("srun", "--gres=gpu:a100:3", "printenv", "CUDA_VISIBLE_DEVICES")
    assert asked.strip() == "0,1,2"
    assert "none" in own.run("srun", "sh", "-c", "echo ${CUDA_VISIBLE_DEVICES:-none}")


def test_up_mends_what_a_dead_test_left_broken_without_a_restart(own: Cluster) -> None:
    before = daemon_pids()["slurmctld"]
    own.command("kill-node", own.nodes[0])
    own.command("cut", own.nodes[1])
    own.command("pause")
    own.command("up", *OPTIONS)
    assert status()["healthy"]
    assert daemon_pids()["slurmctld"] == before


def test_up_clears_what_a_crash_left(own: Cluster) -> None:
    for pid in daemon_pids().values():
        os.kill(pid, signal.SIGKILL)
    wait("death", lambda: not any(runs(pid) for pid in daemon_pids().values()))
    assert "clearing" in call(own.home, "up", *OPTIONS).stderr
    assert status()["healthy"]


def test_up_clears_a_cluster_whose_state_file_is_lost(own: Cluster) -> None:
    before = daemon_pids()
    (own.home / "state.json").unlink()
    own.command("up", *OPTIONS)
    assert status()["healthy"]
    assert not any(runs(pid) for pid in before.values())


def outside_blocks(hosts: str) -> list[str]:
    """Lines of /etc/hosts that belong to no cluster: others may come and go while we look."""
    lines, inside = [], False
    for line in hosts.splitlines():
        inside = inside or line.startswith("# BEGIN ddp-cluster ")
        lines += [] if inside else [line]
        inside = inside and not line.startswith("# END ddp-cluster ")
    return lines


def network_names() -> str:
    shown = (subprocess.run(("ip", what), capture_output=True, text=True, check=True) for what in ("link", "netns"))
    return "".join(done.stdout for done in shown)


def test_down_leaves_nothing_behind() -> None:
    home, prefix = Path(f"{HOME}-gone"), f"{PREFIX}x"
    tag = Layout(home).tag
    before = outside_blocks(Path("/etc/hosts").read_text())
    with private_cluster(home, "--nodes=2", f"--node-prefix={prefix}") as cluster:
        job = cluster.submit("setsid sleep 300 & sleep 300", "--nodes=2")
        cluster.wait_for_job(job, "RUNNING")
        pids = daemon_pids(home)
        assert str(home) in Path("/etc/hosts").read_text()
        assert tag in network_names()
        assert str(home) in mentioned_in_environments()
        cluster.command("down")
        assert not any(runs(pid) for pid in pids.values())
        assert not home.exists()
        assert str(home) not in Path("/etc/hosts").read_text()
        assert outside_blocks(Path("/etc/hosts").read_text()) == before
        assert tag not in network_names()
        assert str(home) not in mentioned_in_environments()
        cluster.command("down")


def mentioned_in_environments() -> str:
    """Everything that daemons were marked with, so that a survivor shows even when nobody recorded it."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            variables = (process / "environ").read_text(errors="replace").split("\0") if process.name.isdigit() else []
        except OSError:
            continue
        found += [variable for variable in variables if variable.startswith("DDP_CLUSTER_DAEMON=")]
    return "\n".join(found)


def test_a_job_over_its_memory_is_killed_where_cgroups_track() -> None:
    home = Path(f"{HOME}-cg")
    if not Path("/sys/fs/cgroup/freezer").exists():
        pytest.skip("needs version 1 control groups with a freezer")
    with private_cluster(home, "--nodes=1", f"--node-prefix={PREFIX}c", "--proctrack=cgroup") as cluster:
        job = cluster.submit("exec /usr/bin/python3 -c 'bytearray(400 << 20)'", "--mem=100")
        assert cluster.wait_for_job(job, "OUT_OF_MEMORY", "COMPLETED", "FAILED") == "OUT_OF_MEMORY"
        cluster.command("down")
    assert not list(Path("/sys/fs/cgroup").glob(f"*/slurm_{PREFIX}c1"))


def test_a_machine_that_cannot_host_a_cluster_is_a_skip_but_a_failure_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = subprocess.CompletedProcess((), 3, "", "cluster: up needs root\n")
    monkeypatch.setattr("tests.clusterfix.call", lambda *_words, **_options: refused)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs root"):
        bring_up(HOME)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="needs root"):
        bring_up(HOME)


def test_the_shared_fixture_names_a_working_cluster(cluster: Cluster) -> None:
    assert os.environ["SLURM_CONF"] == str(cluster.slurm_conf)
    assert (
        subprocess.run(("srun", "hostname"), capture_output=True, text=True, check=True).stdout.strip() in cluster.nodes
    )


def test_only_the_last_user_takes_a_leased_cluster_down() -> None:
    home = Path(f"{HOME}-lease")
    options = ("--nodes=1", f"--node-prefix={PREFIX}l", "--no-accounting")
    other = subprocess.Popen(("sleep", "300"))
    try:
        with private_cluster(home, *options, f"--lease={os.getpid()}") as cluster:
            cluster.command("up", *options, f"--lease={other.pid}")
            cluster.command("release", str(os.getpid()))
            assert status(home)["healthy"]
            other.kill()
            other.wait()
            cluster.command("release", str(os.getpid()))
            assert not home.exists()
            cluster.command("up", *options, f"--lease={os.getpid()}")
            cluster.command("up", *options)
            cluster.command("release", str(os.getpid()))
            assert status(home)["healthy"]
    finally:
        other.kill()
        other.wait()
