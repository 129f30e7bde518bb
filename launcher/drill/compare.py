"""Whether two runs are the same: their checkpoints bit for bit, their metrics number for number, or up to rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from training.storage import Folder

from ..errors import LaunchError
from ..verify.checkpoints import Kept, parse
from ..verify.difference import first_difference, opened
from .runs import Run

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_OF_THE_ATTEMPT = frozenset({"attempt", "time", "samples_per_s"})
"""What a line of the metrics says of the attempt that wrote it, not of the training."""
_Tensors = dict[str, npt.NDArray[np.float64]]


def final(run: Run, steps: int) -> Kept:
    """The checkpoint of the last step. Errors: LaunchError when there is none."""
    name = f"step-{steps:09d}"
    try:
        return parse(run.checkpoints, name)
    except (OSError, ValueError) as error:
        raise LaunchError(f"{run.name}: the checkpoint of its last step, {name}: {error}") from error


def differences(calm: Run, other: Run, steps: int) -> Iterator[str]:
    """Where `other` is not bit for bit the undisturbed run: first in its metrics, then in its last checkpoint."""
    if (found := first_in_metrics(calm, other)) is not None:
        yield found
    one, two, sides = final(calm, steps), final(other, steps), (calm.name, other.name)
    if (found := first_difference(calm.checkpoints, one, other.checkpoints, sides)) is not None:
        yield f"{one.name}/{found}"
    elif one.samples != two.samples:
        yield f"{one.name}: {one.samples:,} samples in {calm.name}, {two.samples:,} in {other.name}"


def same_state(calm: Run, other: Run, steps: int) -> Iterator[str]:
    """As `differences`, for runs with other numbers of ranks: of their metrics, and of their model and optimizer.

    Their tensors are compared by name, in whatever files they are. Random states are the ranks' own, and left out.
    """
    if (found := first_in_metrics(calm, other)) is not None:
        yield found
    for kind in ("model", "optimizer"):
        one, two = (_tensors(run.checkpoints, final(run, steps), kind) for run in (calm, other))
        wrong = [name for name in {**one, **two} if one.get(name) != two.get(name)]
        if wrong:
            yield f"step-{steps:09d}: {kind}: {wrong[0]} differs between {calm.name} and {other.name}"
            return


def first_in_metrics(calm: Run, other: Run) -> str | None:
    """The first step for which a line of `other`, superseded ones too, says otherwise than the undisturbed run's."""
    due = {(row["kind"], row["step"]): row for row in _lines(calm)}
    wrong = []
    for row in _lines(other):
        was = due.get((row["kind"], row["step"]), {})
        keys = [key for key in {**was, **row} if key not in _OF_THE_ATTEMPT and was.get(key) != row.get(key)]
        if keys:
            wrong.append((row["step"], row, was, keys[0]))
    if not wrong:
        return None
    step, row, was, key = min(wrong, key=lambda found: found[0])
    what = "" if row["kind"] == "train" else f"{row['kind']} "
    where = f"attempt {row['attempt']}, which went on from step {other.began().get(row['attempt'], 0)}"
    return f"step {step}: {what}{key} is {was.get(key)} in {calm.name}, {row.get(key)} in {other.name} ({where})"


def _lines(run: Run) -> Iterator[dict[str, Any]]:
    return (row for row in run.metrics() if row["kind"] in ("train", "eval"))


def distance(calm: Run, other: Run, steps: int) -> float:
    """How far the parameters and buffers of `other` are from the undisturbed run's at the last step: |a - b| / |a|.

    |.| is the 2-norm over all floating tensors of the model together, in float64. Infinite where one has no such tensor
    of the same shape, or holds what is no number. Errors: OSError when a file cannot be read.
    """
    return apart(_model(calm.checkpoints, final(calm, steps)), _model(other.checkpoints, final(other, steps)))


def apart(one: _Tensors, other: _Tensors) -> float:
    """As `distance`, of two models' tensors by name."""
    if {name: value.shape for name, value in one.items()} != {name: value.shape for name, value in other.items()}:
        return math.inf
    norm = math.sqrt(sum(float(np.sum(value**2)) for value in one.values()))
    apart = math.sqrt(sum(float(np.sum((value - other[name]) ** 2)) for name, value in one.items()))
    relative = apart / norm if norm else apart
    return relative if math.isfinite(relative) else math.inf


def _model(folder: Folder, one: Kept) -> _Tensors:
    """The floating tensors of the model as float64."""
    found: _Tensors = {}
    for name, (kind, shape, content) in _tensors(folder, one, "model").items():
        value = _numbers(kind, content)
        if value is not None:
            found[name] = value.reshape(shape)
    return found


def _tensors(folder: Folder, one: Kept, kind: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of the tensors in all files of a kind, by name."""
    found = {}
    for name in sorted(one.files):
        if name.startswith(f"{kind}-") and name.endswith(".safetensors"):
            heads, data = opened(folder.read(f"{one.name}/{name}"))
            for tensor, head in heads.items():
                found[tensor] = (head["dtype"], tuple(head["shape"]), bytes(data[slice(*head["data_offsets"])]))
    return found


def _numbers(kind: str, content: bytes) -> npt.NDArray[np.float64] | None:
    """Elements of a floating type as float64; None for another type. bfloat16 is the upper half of float32."""
    if kind == "BF16":
        return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(content, _FLOATS[kind]).astype(np.float64) if kind in _FLOATS else None
