"""Proves that the ranks' parts of a checkpoint are of one save, whatever goes wrong on one of them meanwhile."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

from training.checkpoint import Checkpoints
from training.errors import CheckpointError
from training.ranks import Ranks
from training.run import process_group
from training.saving import _refuse_mixed, _Share, _total
from training.shelf import Keep
from training.telling import tell

Gang = Callable[..., list[Any]]


class FullDisk:
    """A stream whose every write fails."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_word_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    tell("nobody reads this")


def _saves_on_a_full_disk(ranks: Ranks, folder: Path) -> list[int]:
    """Rank 0 can write neither its files, the first time, nor a word about it. Returns the steps that were saved."""
    with process_group(ranks, torch.device("cpu")):
        return _save_three(ranks, folder)


def _save_three(ranks: Ranks, folder: Path) -> list[int]:
    store = Checkpoints(str(folder), Keep(9), ranks, pauses_s=(0.01,))
    if ranks.rank == 0:
        sys.stderr = FullDisk()  # type: ignore[assignment]
        real, tries = store.writer.folder.write, []

        def write(name: str, chunks: Any, *rest: Any) -> Any:
            tries.append(name)
            if len(tries) == 1:
                raise OSError(errno.ENOSPC, "No space left on device", name)
            return real(name, chunks, *rest)

        object.__setattr__(store.writer.folder, "write", write)
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.0, momentum=0.9)
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
                optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, step)
        store.save(step, step, model, optimizer)
    return [saved.step for saved in store.poll() if saved.error is None]


def test_all_ranks_try_again_together_where_one_cannot_even_say_why(gang: Gang, tmp_path: Path) -> None:
    assert gang(2, _saves_on_a_full_disk, tmp_path) == [[1, 2, 3]] * 2
    for step in (1, 2, 3):
        found = [load_file(path) for path in sorted((tmp_path / f"step-{step:09d}").glob("*.safetensors"))]
        values = {float(value) for tensors in found for tensor in tensors.values() for value in tensor.flatten()}
        assert values == {step}


def test_parts_of_different_saves_make_no_checkpoint() -> None:
    _refuse_mixed([_Share(3, 30, {}, {}), _Share(3, 30, {}, {})])
    with pytest.raises(CheckpointError, match=r"not at the same save: they are at those of steps \[3, 2\]"):
        _refuse_mixed([_Share(3, 30, {}, {}), _Share(2, 20, {}, {})])


def test_a_ledger_of_other_samples_than_the_run_has_seen_makes_no_checkpoint() -> None:
    part = {"data": {}, "since": {"step": 0, "samples": 10}, "samples": 15, "order": "0" * 32, "set": "0" * 32}
    assert _total(3, 40, [part, part])["samples"] == 30
    with pytest.raises(CheckpointError, match="step 3: the ledger has 30 samples since 10, the run has seen 41"):
        _total(3, 41, [part, part])
