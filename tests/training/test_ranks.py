"""A process learns its place from the variables of torchrun or of the launcher, and contradictions are named."""

from __future__ import annotations

import pytest

from training.ranks import Ranks

FULL = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}


def test_without_variables_there_is_one_process() -> None:
    assert Ranks.from_environment({}) == Ranks(0, 0, 1, 1, 0)


def test_all_variables_are_read() -> None:
    assert Ranks.from_environment(FULL) == Ranks(rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1)


def test_torchrun_calls_the_node_a_group() -> None:
    env = {k: v for k, v in FULL.items() if k != "NODE_RANK"} | {"GROUP_RANK": "1"}
    assert Ranks.from_environment(env).node_rank == 1


def test_one_node_is_taken_where_only_the_global_place_is_given() -> None:
    assert Ranks.from_environment({"RANK": "1", "WORLD_SIZE": "2"}) == Ranks(1, 1, 2, 2, 0)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1 is not below WORLD_SIZE=4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE='four' is no number"),
        ({"RANK": ""}, "RANK='' is no number"),
    ],
)
def test_a_contradiction_is_named(changed: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Ranks.from_environment(FULL | changed)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_half_a_set_is_refused(missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} is not set, though other rendezvous variables are"):
        Ranks.from_environment({k: v for k, v in FULL.items() if k != missing})
