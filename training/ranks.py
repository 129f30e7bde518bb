"""Who this process is among the ranks, read once from the variables that torchrun defined and the launcher sets too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """One rank's place. Without the variables: a single process."""

    rank: int = 0
    """Global rank, 0..world_size-1."""
    local_rank: int = 0
    """Rank on its node, 0..local_world_size-1."""
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Ranks:
        """Read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and NODE_RANK (torchrun: GROUP_RANK).

        Errors: ValueError naming the variable when one is no number or contradicts another.
        """
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls()
        rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local_rank = _number(env, "LOCAL_RANK", rank)
        ranks = cls(
            rank=rank,
            local_rank=local_rank,
            world_size=world,
            local_world_size=_number(env, "LOCAL_WORLD_SIZE", world),
            node_rank=_number(env, "NODE_RANK", _number(env, "GROUP_RANK", 0)),
        )
        if not 0 <= ranks.rank < ranks.world_size:
            raise ValueError(f"RANK={ranks.rank} is not below WORLD_SIZE={ranks.world_size}")
        if not 0 <= ranks.local_rank < ranks.local_world_size:
            raise ValueError(f"LOCAL_RANK={ranks.local_rank} is not below LOCAL_WORLD_SIZE={ranks.local_world_size}")
        return ranks


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"{name} is not set, though other rendezvous variables are")
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is no number") from None
