"""Proves that a rank's place is read from its step, whatever its job says, and that contradictions are named."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.rendezvous import Placement, PlacementError, emulated, from_slurm, variables

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "2,3",
}
JOB = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "8(x4)", "SLURM_NTASKS": "32", "SLURM_NNODES": "4"}


def test_a_step_smaller_than_its_job_is_what_counts() -> None:
    place = from_slurm({**JOB, **STEP})
    assert place == Placement(
        rank=3,
        local_rank=1,
        node_rank=1,
        world_size=4,
        local_world_size=2,
        nodes=("n2", "n3"),
        tasks_per_node=(2, 2),
        job="4711",
        restart=0,
        step="0",
    )
    assert (place.head, place.host, place.address) == ("n2", "n3", "n2")
    assert [place.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_uneven_tasks_and_host_names_of_several_kinds() -> None:
    uneven = {"SLURM_STEP_NODELIST": "gpu-a[01-02],big.site", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    ids = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    place = from_slurm({**STEP, **uneven, **ids, "SLURM_GTIDS": "4"})
    assert place.nodes == ("gpu-a01", "gpu-a02", "big.site")
    assert (place.tasks_per_node, place.local_world_size, place.host) == ((2, 2, 1), 1, "big.site")


def test_a_task_of_an_array_that_was_restarted() -> None:
    array = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    place = from_slurm({**STEP, **array})
    assert (place.job, place.restart) == ("4700_3", 2)


def test_without_step_variables_the_job_is_read_for_a_task_that_srun_started() -> None:
    bare = {name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP_N") and "TASKS" not in name}
    job = {"SLURM_JOB_NODELIST": "n[2-3]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    assert from_slurm({**bare, **job, "SLURM_NTASKS": "4"}) == from_slurm(STEP)
    assert from_slurm({**bare, **job}).world_size == 4


def test_a_job_of_one_task_needs_no_step() -> None:
    ids = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    place = from_slurm({**ids, "SLURM_JOB_NODELIST": "n7", "SLURM_TASKS_PER_NODE": "1", "SLURM_JOB_ID": "1"})
    assert (place.world_size, place.host, place.address, place.step) == (1, "n7", "127.0.0.1", "")


def test_the_batch_script_of_a_larger_job_is_no_rank() -> None:
    ids = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    text = (
        "SLURM_JOB_NODELIST=n[1-4], SLURM_TASKS_PER_NODE=8(x4), SLURM_NTASKS=32, but neither SLURM_STEP_NODELIST nor "
        "SLURM_STEP_ID is set: this process is the batch script or a shell of the job, not one of its tasks; start the "
        "ranks with srun"
    )
    with pytest.raises(PlacementError, match=re.escape(text)):
        from_slurm({**JOB, **ids})


def test_ranks_dealt_out_in_turn_have_no_foretold_host() -> None:
    dealt = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "1,3"}
    assert from_slurm({**STEP, **dealt}).node_of(2) is None
    first = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,2"}
    assert from_slurm({**STEP, **first, "SLURM_DISTRIBUTION": "cyclic"}).node_of(1) is None


def test_one_task_a_node_lies_in_order_though_srun_calls_it_cyclic() -> None:
    single = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    ids = {"SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "1", "SLURM_DISTRIBUTION": "cyclic"}
    assert [from_slurm({**STEP, **single, **ids}).node_of(rank) for rank in (0, 1)] == [0, 1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"SLURM_PROCID": None}, "SLURM_PROCID is not set: this process is no task of a step"),
        ({"SLURM_LOCALID": None}, "SLURM_LOCALID is not set; start the ranks with srun"),
        ({"SLURM_STEP_NUM_TASKS": None}, "SLURM_STEP_NUM_TASKS is not set"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE is not set or empty"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID='-1' is no number"),
        ({"SLURM_STEP_NODELIST": "n[2-"}, "SLURM_STEP_NODELIST: 'n[2-', character 2: this bracket is not closed"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is not below SLURM_STEP_NUM_TASKS=4; variables of another job may"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2, but SLURM_STEP_NODELIST=n[2-3] has 2;"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2, but SLURM_STEP_TASKS_PER_NODE=2(x2) has 2 here"),
        ({"SLURM_STEP_NODELIST": "n2"}, "SLURM_STEP_NUM_TASKS=4: 1 hosts, but task counts for 2"),
        ({"SLURM_STEP_NUM_TASKS": "5"}, "SLURM_STEP_NUM_TASKS=5: the task counts add up to 4"),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "rank 0 is not on the step's first host"),
        (
            {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_DISTRIBUTION": "arbitrary"},
            "with --distribution=arbitrary the host file must begin with the first host in the scheduler's order",
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_GTIDS": "2,3"},
            "SLURM_LOCALID=1, SLURM_NODEID=1, but SLURM_GTIDS=2,3 has 3 there",
        ),
        ({"SLURM_LOCALID": "0"}, "no task of SLURM_STEP_TASKS_PER_NODE=2(x2) has these numbers"),
    ],
)
def test_a_contradiction_is_named(change: dict[str, str | None], text: str) -> None:
    env = {name: value for name, value in {**STEP, **change}.items() if value is not None}
    with pytest.raises(PlacementError, match=re.escape(text)):
        from_slurm(env)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans(), st.data())
def test_any_layout_that_slurm_makes_is_accepted(counts: list[int], in_turn: bool, data: st.DataObject) -> None:
    slots = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    if in_turn:
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    rank = data.draw(st.integers(0, len(slots) - 1))
    node, local = slots[rank]
    env = {
        "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
        "SLURM_STEP_TASKS_PER_NODE": ",".join(str(count) for count in counts),
        "SLURM_STEP_NUM_TASKS": str(len(slots)),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_GTIDS": ",".join(str(r) for r, slot in enumerate(slots) if slot[0] == node),
        "SLURM_DISTRIBUTION": "cyclic" if in_turn else "block:cyclic",
    }
    place = from_slurm(env)
    assert (place.rank, place.local_rank, place.node_rank, place.world_size) == (rank, local, node, len(slots))
    assert place.local_world_size == counts[node]
    is_told = not in_turn or len(counts) == 1 or max(counts) == 1
    assert place.node_of(rank) == (node if is_told else None)


SHOW = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from launcher.rendezvous import from_slurm
p = from_slurm(os.environ)
print(p.rank, p.node_rank, p.local_rank, p.world_size, *p.tasks_per_node, p.host == os.uname().nodename, p.block)
"""


@pytest.mark.cluster
def test_real_steps_of_all_shapes_are_read(cluster: Any) -> None:
    show = (sys.executable, "-c", SHOW)
    quick = ("srun", "--quiet", "--ntasks-per-core=1")
    uneven = cluster.run(*quick, "-N2", "-n3", *show)
    assert sorted(uneven.splitlines()) == ["0 0 0 3 2 1 True True", "1 0 1 3 2 1 True True", "2 1 0 3 2 1 True True"]
    in_turn = cluster.run(*quick, "-N2", "-n4", "--ntasks-per-node=2", "--distribution=cyclic", *show)
    assert sorted(in_turn.splitlines()) == [f"{n} {n % 2} {n // 2} 4 2 2 True False" for n in range(4)]
    of_two_kinds = cluster.run(*quick, "-N1", "-n1", *show, ":", "-N1", "-n2", *show)
    # Which distribution such a step's tasks are told is that of either component, and changes from run to run.
    assert sorted(line.rpartition(" ")[0] for line in of_two_kinds.splitlines()) == [
        "0 0 0 3 1 2 True",
        "1 1 0 3 1 2 True",
        "2 1 1 3 1 2 True",
    ]
    smaller = cluster.run("salloc", "--quiet", "-N3", "-n3", *quick, "-N2", "-n2", "--relative=1", *show)
    assert sorted(smaller.splitlines()) == ["0 0 0 2 1 1 True True", "1 1 0 2 1 1 True True"]


def test_emulated_nodes_share_this_machine() -> None:
    places = emulated(2, 2)
    assert [(p.rank, p.node_rank, p.local_rank) for p in places] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert {(p.world_size, p.local_world_size, p.nodes, p.tasks_per_node) for p in places} == {
        (4, 2, ("127.0.0.1", "127.0.0.2"), (2, 2))
    }
    assert {p.address for p in places} == {"127.0.0.1"}
    assert len(set(emulated(300, 1)[0].nodes)) == 300


def test_the_variables_are_those_of_torchrun() -> None:
    expected: dict[str, Any] = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "n2",
        "MASTER_PORT": "12001",
        "OMP_NUM_THREADS": "8",
    }
    place = from_slurm(STEP)
    assert variables(place, "n2", 12001, 8) == expected
    expected |= {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0"}
    assert variables(place, "n2", 12001, 8, "ib0") == expected
