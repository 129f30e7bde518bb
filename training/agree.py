"""Work that all ranks must see the same end of."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .errors import CheckpointError, TrainingError
from .ranks import Ranks

T = TypeVar("T")


def together(
    ranks: Ranks,
    failed: str,
    work: Callable[[], T],
    everyone: bool = False,
    group: dist.ProcessGroup | None = None,
) -> list[T]:
    """Run `work` on rank 0, or on every rank, and give each rank the results of all, in the order of ranks.

    They talk in `group`, by default the process group of all. All ranks call it at the same point. An error on any rank
    is raised as a CheckpointError, which begins with `failed`, on all of them: none waits for one that has given up.
    """
    value: Any = None
    error: Exception | None = None
    if everyone or ranks.rank == 0:
        try:
            value = work()
        except Exception as caught:  # noqa: BLE001 - raised below, after the other ranks were told
            error = caught
    outcomes = _exchange(ranks, (value, None if error is None else reason(error)), group)
    several = len(outcomes) > 1
    texts = [f"rank {rank}: {text}" if several else text for rank, (_, text) in enumerate(outcomes) if text]
    if texts:
        raise CheckpointError(f"{failed}: {'; '.join(texts)}") from error
    return [result for result, _ in outcomes]


def reason(error: BaseException) -> str:
    """One line for people: the path and what the system said, with a remedy for a full disk."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{error.filename}: {error.strerror}" + ("; free some space, or keep fewer checkpoints" if full else "")
    ours = isinstance(error, OSError | TrainingError)
    return str(error) if ours else f"{type(error).__name__}: {error}"


def _exchange(
    ranks: Ranks, item: tuple[Any, str | None], group: dist.ProcessGroup | None
) -> list[tuple[Any, str | None]]:
    if ranks.world_size == 1:
        return [item]
    assert dist.is_available() and dist.is_initialized(), "several ranks agree through torch.distributed"
    items: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(items, item, group=group)
    return items
