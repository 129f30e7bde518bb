"""Proves which GPUs a rank of a local run sees: what Slurm would show it on a node of its own."""

from __future__ import annotations

import pytest

from launcher.gpus import assign, per_node, present
from launcher.rendezvous import emulated
from launcher.spec import Resources


@pytest.mark.parametrize(
    ("resources", "outer", "seen"),
    [
        (Resources(1, 2, gpus_per_node="2"), "0,1", ["0,1", "0,1"]),
        (Resources(1, 2, gpus_per_task="1"), "0,1", ["0", "1"]),
        (Resources(2, 2, gpus_per_node="a100:2"), "4,5,6,7", ["4,5", "4,5", "6,7", "6,7"]),
        (Resources(2, 2, gpus_per_task="1"), "4,5,6,7", ["4", "5", "6", "7"]),
        (Resources(2, 1, gpus_per_node="2"), "GPU-a,GPU-b", ["GPU-a,GPU-b", "GPU-a,GPU-b"]),
        (Resources(1, 2), "0,1", ["", ""]),
        (Resources(1, 2, gpus_per_node="0"), "0,1", ["", ""]),
        (Resources(1, 2, gpus_per_node="2"), "", ["", ""]),
    ],
)
def test_each_rank_sees_its_share(resources: Resources, outer: str, seen: list[str]) -> None:
    places = emulated(resources.nodes, resources.tasks_per_node)
    assert [assign(resources, place, outer) for place in places] == seen


def test_the_users_own_choice_of_gpus_is_kept() -> None:
    assert present("2, 3") == ["2", "3"]
    assert present("") == []


def test_gpus_per_task_make_up_a_node() -> None:
    assert per_node(Resources(1, 4, gpus_per_task="2")) == 8
