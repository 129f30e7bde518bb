"""Proves that errors for users form one tree, and that they survive the way between processes."""

from __future__ import annotations

import pickle

from training.errors import CheckpointError, ConfigError, DataError, NotFinite, TrainingError


def test_one_tree() -> None:
    assert all(issubclass(kind, TrainingError) for kind in (ConfigError, DataError, CheckpointError, NotFinite))


def test_not_finite_names_step_rank_and_remedy_and_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(NotFinite(12, 3, float("inf"))))
    assert (error.step, error.rank) == (12, 3)
    assert str(error).startswith("step 12: the loss on rank 3 is inf; no checkpoint was written after it.")
    assert "clip_norm" in str(error)
