"""Proves that the reference of the spec names every key with its true type and default, and that its examples work."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from launcher.reading.schema import Field, all_paths, fields_of
from launcher.reading.tree import core_value
from launcher.spec import JobSpec

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "spec.md"
ROW = re.compile(r"\| `([\w.]+)` \| ([^|]+) \| ?([^|]*?) \| ?(.*?) ?\|")
ROWS = {match[1]: match for line in REFERENCE.read_text("utf-8").splitlines() if (match := ROW.fullmatch(line))}


def field(path: str) -> Field:
    section: Any = JobSpec
    *above, key = path.split(".")
    for name in above:
        section = fields_of(section)[name].kind
    return fields_of(section)[key]


def type_name(known: Field) -> str:
    names = {int: "whole number", float: "number", bool: "true, false", str: "text", Any: "mapping or list"}
    shape, inner = typing.get_origin(known.kind), typing.get_args(known.kind)
    if known.is_section:
        return "section"
    if shape is Literal:
        return ", ".join(inner)
    if shape is list:
        return f"list of {names[inner[0]]}s"
    if shape is dict:
        return "mapping" if inner[1] is Any else "mapping of texts"
    return names[known.kind]


def test_every_key_of_the_spec_is_in_the_reference_and_no_other() -> None:
    assert sorted(ROWS) == sorted(all_paths(JobSpec))


@pytest.mark.parametrize("path", ROWS)
def test_a_key_is_described_as_it_is(path: str) -> None:
    known = field(path)
    _, kind, default, meaning = ROWS[path].groups()
    assert kind == type_name(known)
    if known.is_section and not known.optional:
        assert default == ""
        return
    expected = known.default()
    shown = yaml.safe_load(default) if default[:1] in "[{" else core_value(default)
    assert shown == expected, f"{path}: the default is {expected}"
    for example in re.findall(r"Example: `(.+?)`", meaning):
        assert list(yaml.safe_load(example)) == [path.rpartition(".")[2]]


def test_the_example_is_a_valid_spec(resolve: Callable[..., Any]) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", REFERENCE.read_text("utf-8"), re.DOTALL)
    assert [resolve(block).spec.name for block in blocks] == ["digits-ddp"]


def test_each_example_of_a_key_is_valid(resolve: Callable[..., Any]) -> None:
    base = "name: x\ntrain: {task: 'm:T', steps: 1, batch: {per_rank: 1}}\n"
    for path, row in ROWS.items():
        for example in re.findall(r"[Ee]xample: `(.+?)`| or `(options: .+?)`", row[4]):
            (value,) = yaml.safe_load(example[0] or example[1]).values()
            text = base.replace("train:", "wandb: {}\ntrain:") if path.startswith("wandb.") else base
            if path in ("command", "profile"):
                continue  # they need a spec, or a site's file, of their own
            assert resolve(
                text,
                f"{path}={yaml.safe_dump(value, default_flow_style=True, width=9999).strip()}".removesuffix("\n..."),
            )
