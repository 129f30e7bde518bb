"""The first difference between two checkpoints, in words. Free of torch: safetensors files are read by their header."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from training.storage import Folder

from .checkpoints import MANIFEST, Kept, parse

_READ_AS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
    "U8": "<u1",
}


_Sides = tuple[str, str]


def first_difference(
    recorded: Folder, one: Kept, replayed: Folder, sides: _Sides = ("the run", "the replay")
) -> str | None:
    """Where the checkpoint of the same name in `replayed` differs first: file, tensor, index and both values.

    Compared are parameters, optimizer state, random states and the ledger, in this order; None when all are equal. The
    files are read: that their manifests name the same hashes proves nothing of a file that was damaged since.
    `sides`: what the two are called in the text.
    Errors: OSError when a file cannot be read.
    """
    other = parse(replayed, one.name)
    names = sorted({*one.files, *other.files}, key=_rank_of)
    for name in names:
        if name not in other.files or name not in one.files:
            return f"{name}: only in {sides[0] if name in one.files else sides[1]}"
        contents = (recorded.read(f"{one.name}/{name}"), replayed.read(f"{one.name}/{name}"))
        found = _in_file(name, *contents, sides)
        if found is not None:
            return f"{name}: {found}"
    for place, was, now in differing(one.ledger, other.ledger, ""):
        return f"{MANIFEST}: ledger{place}: {was} in {sides[0]}, {now} in {sides[1]}"
    return None


def _rank_of(name: str) -> tuple[int, str]:
    kinds = ("model", "optimizer", "state", "rng")
    return next((number for number, kind in enumerate(kinds) if name.startswith(kind)), len(kinds)), name


def _in_file(name: str, was: bytes, now: bytes, sides: _Sides) -> str | None:
    """Where two files of the same name differ; None when only their wording does."""
    if was == now:
        return None
    if name.endswith(".safetensors"):
        return _in_tensors(was, now, sides)
    try:
        for place, old, new in differing(json.loads(was), json.loads(now), ""):
            return f"{place.lstrip('.')}: {_short(old)} in {sides[0]}, {_short(new)} in {sides[1]}"
    except ValueError:
        return "other bytes"
    return None


def _in_tensors(was: bytes, now: bytes, sides: _Sides) -> str | None:
    (heads, old), (new_heads, new) = opened(was), opened(now)
    for name, head in heads.items():
        if name not in new_heads:
            return f"{name}: not in {sides[1]}"
        if (head["dtype"], head["shape"]) != (new_heads[name]["dtype"], new_heads[name]["shape"]):
            return f"{name}: another type or shape in {sides[1]}"
        a = old[slice(*head["data_offsets"])]
        b = new[slice(*new_heads[name]["data_offsets"])]
        if a != b:
            return f"{name}{_in_values(head, a, b, sides)}"
    return next((f"{name}: not in {sides[0]}" for name in new_heads if name not in heads), None)


def opened(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """Header and data of a safetensors file: 8 bytes of length, JSON, then the bytes of all tensors."""
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    head.pop("__metadata__", None)
    return head, memoryview(content)[8 + length :]


def _in_values(head: dict[str, Any], was: memoryview, now: memoryview, sides: _Sides) -> str:
    width = len(was) // max(1, math.prod(head["shape"]))
    different = np.flatnonzero(np.frombuffer(was, np.uint8) != np.frombuffer(now, np.uint8)) // width
    place = [int(index) for index in np.unravel_index(different[0], head["shape"])] if head["shape"] else []
    count = len(np.unique(different))
    values = ""
    if head["dtype"] in _READ_AS:
        kind = np.dtype(_READ_AS[head["dtype"]])
        old, new = (np.frombuffer(data, kind)[different[0]] for data in (was, now))
        values = f": {old} in {sides[0]}, {new} in {sides[1]}"
    return f"{place}{values} ({count:,} of {math.prod(head['shape']):,} values differ)"


def differing(was: Any, now: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Places at which two JSON values differ."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            yield from differing(was.get(key), now.get(key), f"{place}.{key}")
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for number, pair in enumerate(zip(was, now, strict=True)):
            yield from differing(*pair, f"{place}[{number}]")
    elif was != now:
        yield place, was, now


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
