"""The cluster's settings and configuration texts, without a cluster: pytest tests/slurm/test_settings.py"""

from __future__ import annotations

from pathlib import Path

import pytest
from devcluster import hosts, render, systemconf
from devcluster.cli import parser, settings_from
from devcluster.layout import DEFAULT_HOME, Layout
from devcluster.settings import Settings
from devcluster.shell import ClusterError, run, wait_until
from devcluster.state import State, exclusive, load_state, save_state

LAYOUT = Layout(Path("/var/tmp/some"))


def state(settings: Settings | None = None) -> State:
    return State(settings or Settings(), "10.77.3", 16827)


def slurm_conf(settings: Settings) -> list[str]:
    return render.slurm_conf(LAYOUT, state(settings)).splitlines()


def parsed(*words: str) -> Settings:
    return settings_from(parser().parse_args(["up", *words]))


def test_command_line_without_options_gives_the_defaults() -> None:
    assert parsed() == Settings()


def test_command_line_reads_every_kind_of_option() -> None:
    settings = parsed("--nodes", "2", "--no-accounting", "--extra", "MinJobAge=9", "--extra", "KillWait=3")
    assert (settings.nodes, settings.accounting, settings.extra) == (2, False, ("MinJobAge=9", "KillWait=3"))
    assert parsed("--node-names", "gpu-a1,cpu07").nodes == 2


def test_settings_survive_json() -> None:
    settings = Settings(node_names=("a", "b"), nodes=2, extra=("A=B",))
    assert Settings.from_json(settings.to_json()) == settings


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ClusterError) as caught:
        Settings(nodes=33, gpus=-1, cpus=0, extra=("nonsense",)).check()
    for word in ("--nodes 33", "--gpus -1", "--cpus 0", "nonsense"):
        assert word in str(caught.value)


@pytest.mark.parametrize("names", [("Upper",), ("-dash",), ("a b",), ("a", "a"), ("x" * 41,), ("a\nb",)])
def test_bad_node_names_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ClusterError, match="make no cluster"):
        Settings(node_names=names, nodes=len(names)).check()


def test_differences_name_the_options() -> None:
    assert Settings().differences(Settings(grace_time=3)) == ["--grace-time 10 -> 3"]


def test_nodes_have_addresses_and_typed_gpus() -> None:
    lines = [line for line in slurm_conf(Settings(nodes=2)) if line.startswith("NodeName")]
    assert [line.split()[0] for line in lines] == ["NodeName=n1", "NodeName=n2"]
    assert "NodeAddr=10.77.3.2" in lines[1]
    assert "Gres=gpu:a100:4" in lines[1]


def test_without_gpus_nothing_speaks_of_them() -> None:
    assert "gpu" not in render.slurm_conf(LAYOUT, state(Settings(gpus=0)))
    assert render.gres_conf(LAYOUT, state(Settings(gpus=0))) == ""


def test_preemption_off_leaves_no_trace_of_it() -> None:
    lines = slurm_conf(Settings(preempt_mode="OFF", preempt_signal=False))
    assert "PreemptType=preempt/none" in lines
    assert not [line for line in lines if "GraceTime" in line or "preempt_send_user_signal" in line]


def test_grace_and_requeue_delay_reach_the_file() -> None:
    text = render.slurm_conf(LAYOUT, state(Settings(grace_time=7, requeue_delay=9)))
    assert "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=7" in text
    assert "cred_expire=9" in text


def test_extra_replaces_a_known_key_whatever_its_case_and_adds_an_unknown_one() -> None:
    lines = slurm_conf(Settings(extra=("killwait=77", "MinJobAge=9", "PartitionName=odd Nodes=n1")))
    assert [line for line in lines if line.lower().startswith("killwait")] == ["KillWait=77"]
    assert "MinJobAge=9" in lines
    assert lines[-1] == "PartitionName=odd Nodes=n1"


def test_no_key_comes_twice() -> None:
    keys = [line.partition("=")[0] for line in slurm_conf(Settings())]
    once = [key for key in keys if key not in ("NodeName", "PartitionName")]
    assert len(once) == len(set(once))


def test_only_cgroup_tracking_limits_memory() -> None:
    assert "ConstrainRAMSpace=yes" in render.cgroup_conf(state(Settings(proctrack="cgroup")))
    assert "ConstrainRAMSpace" not in render.cgroup_conf(state())


def test_hosts_block_comes_and_goes_without_touching_other_lines() -> None:
    before = "127.0.0.1 localhost\n# a comment\n10.0.0.1 n1.example"
    first = hosts.with_block(before, Path("/one"), {"a1": "10.77.0.1"})
    both = hosts.with_block(first, Path("/two"), {"b1": "10.77.1.1"})
    assert hosts.with_block(both, Path("/two"), {"b1": "10.77.1.1"}) == both
    assert hosts.without_block(both, Path("/two")) == first
    assert hosts.without_block(first, Path("/one")) == before + "\n"


def test_hosts_block_without_an_end_does_not_swallow_the_next() -> None:
    text = "# BEGIN ddp-cluster /one\n1.1.1.1 a\n# BEGIN ddp-cluster /two\n2.2.2.2 b\n# END ddp-cluster /two\n"
    assert hosts.without_block(text, Path("/one")) == "".join(text.splitlines(keepends=True)[2:])


def test_names_of_others_are_noticed_but_not_those_in_comments() -> None:
    text = "10.0.0.1 n1.example n1\n# 10.0.0.2 n2\n"
    assert hosts.taken_names(text, ("n1", "n2", "n3")) == ["n1"]


def test_two_homes_share_no_name() -> None:
    other = Layout(Path("/var/tmp/other"))
    assert LAYOUT.bridge != other.bridge
    assert LAYOUT.controller_name != other.controller_name
    assert len(LAYOUT.link(32)) <= 15


@pytest.mark.parametrize("home", ["relative", "/with space", "/" + "x" * 80])
def test_unusable_homes_are_refused(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_CLUSTER_HOME", home)
    with pytest.raises(ClusterError, match="absolute path"):
        Layout.from_environment()


def test_a_home_closed_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ClusterError, match="closed to other users"):
        Layout(tmp_path / "home").check_reachable()


def test_state_is_read_back_and_another_versions_state_is_none(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    save_state(layout, state())
    assert load_state(layout) == state()
    layout.state.write_text('{"settings": {"nodes": 1}}')
    assert load_state(layout) is None
    assert load_state(Layout(tmp_path / "nowhere")) is None


def test_an_unknown_node_is_answered_with_the_list() -> None:
    with pytest.raises(ClusterError, match="n1, n2, n3, n4"):
        state().number("n9")


def test_the_lock_is_exclusive_and_freed() -> None:
    with (
        exclusive("a test's lock"),
        pytest.raises(ClusterError, match="another command"),
        exclusive("a test's lock", timeout_seconds=0.1),
    ):
        pass
    with exclusive("a test's lock", timeout_seconds=0.1):
        pass


def test_waiting_ends_with_the_logs_tail_and_at_once_when_the_process_died(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\nthe reason\n")
    with pytest.raises(ClusterError, match=r"(?s)not within 0\.1 s.*the reason"):
        wait_until("it", lambda: False, 0.1, log)
    with pytest.raises(ClusterError, match=r"(?s)its process died.*the reason"):
        wait_until("it", lambda: False, 60, log, alive=lambda: False)


def test_a_failing_command_is_quoted_with_what_it_said() -> None:
    with pytest.raises(ClusterError, match=r"exit code 3: sorry"):
        run("sh", "-c", "echo sorry >&2; exit 3")
    with pytest.raises(ClusterError, match="not installed"):
        run("no-such-program-here")


def test_a_machine_without_a_slurm_conf_is_lent_the_default_clusters(tmp_path: Path) -> None:
    place, default = tmp_path / "slurm.conf", Layout(Path(DEFAULT_HOME))
    systemconf.lend(Layout(tmp_path / "other"), place)
    assert not place.is_symlink()
    systemconf.lend(default, place)
    systemconf.lend(default, place)
    assert place.readlink() == default.slurm_conf
    systemconf.take_back(Layout(tmp_path / "other"), place)
    assert place.is_symlink()
    systemconf.take_back(default, place)
    assert not place.is_symlink()


def test_a_slurm_conf_that_the_machine_has_is_left_alone(tmp_path: Path) -> None:
    place, default = tmp_path / "slurm.conf", Layout(Path(DEFAULT_HOME))
    place.write_text("ClusterName=real\n")
    systemconf.lend(default, place)
    systemconf.take_back(default, place)
    assert place.read_text() == "ClusterName=real\n"
