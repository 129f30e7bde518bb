"""Proves that a drill tells runs apart that differ in one number, and measures how far apart they are.

python -m pytest tests/launcher/test_drill_compare.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from launcher.drill.child import Interrupts
from launcher.drill.compare import apart, differences, distance, first_in_metrics, same_state
from launcher.drill.runs import Run
from launcher.errors import LaunchError
from training.bytestream import Written
from training.manifest import describe
from training.runfolder import append_json, write_json
from training.storage import LocalFolder

SPEC = "name: t\ntrain: {task: synthetic, steps: 2, batch: {per_rank: 1}}\n"
MODEL = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "count": torch.tensor(7)}


def made(
    home: Path, name: str, losses: list[float], model: dict[str, Tensor], samples: int = 2, first: str = "w"
) -> Run:
    """A run of two steps with one checkpoint, made by hand."""
    run = Run(home / name, [], Interrupts())
    folder = run.home / "t-abcd"
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(SPEC)
    (folder / "attempts" / "0001").mkdir(parents=True)
    write_json(run.folder.attempt(1).began, {"step": 0})
    for step, loss in enumerate(losses, 1):
        line = {"attempt": 1, "time": step + len(name), "step": step, "samples": step, "kind": "train", "loss": loss}
        append_json(run.folder.metrics, {**line, "samples_per_s": len(name)})
    store = LocalFolder(run.folder.checkpoints)
    store.make("step-000000002")
    files: dict[str, Written] = {}
    parts = {"model-00000": {first: model[first]}, "model-00001": {k: v for k, v in model.items() if k != first}}
    for file, tensors in parts.items():
        files[f"{file}.safetensors"] = store.write(f"step-000000002/{file}.safetensors", [save(tensors)])
    store.write("step-000000002/manifest.json", [describe(2, samples, 2, files, {}, {"order": "1"}, {})])
    return run


def pair(home: Path, **other: Any) -> tuple[Run, Run]:
    same: dict[str, Any] = {"losses": [0.5, 0.25], "model": MODEL}
    return made(home, "calm", **same), made(home, "same-ranks", **{**same, **other})


def test_runs_that_differ_in_time_and_speed_alone_are_the_same(tmp_path: Path) -> None:
    calm, other = pair(tmp_path)
    assert list(differences(calm, other, 2)) == []
    assert distance(calm, other, 2) == 0.0


def test_the_first_loss_and_the_first_value_that_differ_are_named(tmp_path: Path) -> None:
    model = {**MODEL, "w": torch.tensor([3.0, 0.5])}
    calm, other = pair(tmp_path, losses=[0.5, 0.2500001], model=model)
    assert list(differences(calm, other, 2)) == [
        "step 2: loss is 0.25 in calm, 0.2500001 in same-ranks (attempt 1, which went on from step 0)",
        "step-000000002/model-00000.safetensors: w[1]: 0.0 in calm, 0.5 in same-ranks (1 of 2 values differ)",
    ]


def test_another_number_of_samples_is_a_difference(tmp_path: Path) -> None:
    calm, other = pair(tmp_path, samples=3)
    assert list(differences(calm, other, 2)) == ["step-000000002: 2 samples in calm, 3 in same-ranks"]


def test_a_superseded_line_counts_and_so_does_one_too_many(tmp_path: Path) -> None:
    calm, other = pair(tmp_path)
    row = {"attempt": 2, "time": 0, "step": 1, "samples": 1, "kind": "train", "loss": 0.75, "samples_per_s": 1}
    append_json(other.folder.metrics, row)
    found = first_in_metrics(calm, other)
    assert found == "step 1: loss is 0.5 in calm, 0.75 in same-ranks (attempt 2, which went on from step 0)"
    calm, other = pair(tmp_path / "more", losses=[0.5, 0.25, 0.125])
    found = first_in_metrics(calm, other)
    assert found is not None and found.startswith("step 3: attempt") is False
    assert found.startswith("step 3: ")


def test_half_a_line_of_a_killed_rank_is_passed_over(tmp_path: Path) -> None:
    calm, other = pair(tmp_path)
    with other.folder.metrics.open("a") as out:
        out.write('{"attempt": 1, "st')
    append_json(other.folder.metrics, {"attempt": 1, "step": 2, "samples": 2, "kind": "train", "loss": 0.25})
    assert first_in_metrics(calm, other) is None


def test_a_run_without_its_last_checkpoint_is_told(tmp_path: Path) -> None:
    calm, other = pair(tmp_path)
    other.checkpoints.remove("step-000000002")
    with pytest.raises(LaunchError, match=r"^same-ranks: the checkpoint of its last step, step-000000002: "):
        list(differences(calm, other, 2))


def test_the_distance_is_relative_and_taken_over_all_floating_tensors(tmp_path: Path) -> None:
    far = {"w": torch.tensor([3.0, 3.0]), "b": torch.tensor([0.0]), "count": torch.tensor(9)}
    calm, other = pair(tmp_path, model=far)
    assert distance(calm, other, 2) == math.sqrt(9.0 + 16.0) / 5.0


def test_half_precision_is_read_exactly(tmp_path: Path) -> None:
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float64)):
        model = {**MODEL, "w": torch.tensor([3.0, 0.0], dtype=dtype)}
        calm = made(tmp_path / str(number), "calm", [0.5, 0.25], model)
        other = made(
            tmp_path / str(number), "other", [0.5, 0.25], {**model, "w": torch.tensor([3.0, 2.5], dtype=dtype)}
        )
        assert distance(calm, other, 2) == 0.5


def test_other_tensors_and_what_is_no_number_are_infinitely_far(tmp_path: Path) -> None:
    one = {"w": np.ones(3)}
    assert apart(one, {"v": np.ones(3)}) == math.inf
    assert apart(one, {"w": np.ones(4)}) == math.inf
    assert apart(one, {"w": np.array([1.0, math.nan, 1.0])}) == math.inf


def test_the_same_tensors_in_other_files_are_the_same_state(tmp_path: Path) -> None:
    calm, other = pair(tmp_path)
    assert list(same_state(calm, other, 2)) == []
    swapped = made(tmp_path, "other-ranks", [0.5, 0.25], MODEL, first="b")
    assert list(same_state(calm, swapped, 2)) == []
    wrong = made(tmp_path, "wrong", [0.5, 0.5], {**MODEL, "count": torch.tensor(8)}, first="b")
    assert list(same_state(calm, wrong, 2)) == [
        "step 2: loss is 0.25 in calm, 0.5 in wrong (attempt 1, which went on from step 0)",
        "step-000000002: model: count differs between calm and wrong",
    ]


NUMBERS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5)


@given(NUMBERS, st.floats(0.0, 1e3))
def test_the_distance_grows_with_the_difference_and_has_no_unit(values: list[float], scale: float) -> None:
    one = {"w": np.array(values)}
    moved = {"w": np.array(values) * 1.5}
    norm = float(np.linalg.norm(one["w"]))
    assert apart(one, one) == 0.0
    if norm > 1e-100:
        assert apart(one, moved) == pytest.approx(0.5)
        assert json.dumps(apart(one, {"w": one["w"] * (1 + scale)})) != "NaN"
