"""Proves that `launch show` prints YAML that reads back as the resolved spec, and where each value came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from launcher import show
from launcher.reading import site

Resolve = Callable[..., Any]


def test_every_leaf_says_where_its_value_came_from(tmp_path: Path, resolve: Resolve) -> None:
    config = site.config_path({"HOME": str(tmp_path)})
    config.parent.mkdir(parents=True)
    config.write_text("default: here\nprofiles:\n  here:\n    spec:\n      slurm: {account: ab12}\n")
    (tmp_path / "low.yaml").write_text("train: {task: text, steps: 3}\n")
    text = "base: low.yaml\nname: x\ntrain:\n  batch: {per_rank: 8}\nenv: {A: '${name}'}\n"
    lines = show.text(resolve(text, "train.seed=3")).splitlines()
    told = {line.split(":")[0].strip(): line.split("  # ")[1] for line in reversed(lines) if "  # " in line}
    assert [told[key] for key in ("name", "account", "task", "per_rank", "A", "seed", "runs", "profile")] == [
        "spec.yaml:2",
        "site config.yaml:5",
        "low.yaml:1",
        "spec.yaml:4",
        "spec.yaml:5",
        "override",
        "default",
        "site config.yaml:5",
    ]
    assert "  seed: 3                                     # override" in lines


def test_it_reads_back_as_the_resolved_spec(resolve: Resolve) -> None:
    text = """\
name: "0x10"
command: [sh, -c, "a: b # c\\n\\t", 'it''s', "\\u2028\\e é", "", "null", "- x", "{", "[x]", "1e3", "%", "@"]
env: {A: "two\\nlines", B: "007", "C": " x "}
slurm: {options: [--exclusive]}
"""
    resolved = resolve(text)
    assert yaml.safe_load(show.text(resolved)) == resolved.plain()
    options = resolve(
        "name: x\ntrain: {task: t:C, steps: 1, batch: {per_rank: 1}, options: {a: [{b: 1, 'c d': []}], e: {}}}\n"
    )
    assert yaml.safe_load(show.text(options)) == options.plain()


def test_secrets_are_masked(resolve: Resolve) -> None:
    options = "{api_key: hunter2, nested: [{token: hunter2}], deep: {password: hunter2}, n: 1}"
    text = show.text(resolve("name: x\ntrain: {task: t:C, steps: 1, batch: {per_rank: 1}, options: " + options + "}\n"))
    assert "hunter2" not in text
    assert yaml.safe_load(text)["train"]["options"] == {
        "api_key": "********",
        "nested": [{"token": "********"}],
        "deep": {"password": "********"},
        "n": 1,
    }
