"""Proves that the schema is read from the dataclasses in YAML keys, and what a did-you-mean proposes."""

from __future__ import annotations

from typing import Literal

import pytest

from launcher.reading.schema import all_paths, did_you_mean, did_you_mean_key, example, fields_of, words
from launcher.spec import JobSpec, SlurmOptions
from training.config import BatchConfig, TrainConfig


def test_fields_carry_their_yaml_keys_types_and_defaults() -> None:
    batch = fields_of(BatchConfig)
    assert list(batch) == ["per_rank", "global", "accumulate"]
    assert (batch["global"].kind, batch["global"].optional, batch["global"].default()) == (int, True, None)
    train = fields_of(TrainConfig)
    assert (train["task"].kind, train["task"].optional, train["task"].default()) == (str, False, "???")
    assert (train["batch"].kind, train["batch"].is_section) == (BatchConfig, True)
    assert fields_of(SlurmOptions)["options"].raw_text


def test_a_default_is_fresh_each_time() -> None:
    setup = fields_of(SlurmOptions)["setup"]
    setup.default().append("x")
    assert setup.default() == []


def test_all_paths_of_the_spec() -> None:
    paths = list(all_paths(JobSpec))
    assert {"name", "train", "train.batch", "train.batch.global", "wandb.mode"} <= set(paths)
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize(
    ("given", "prefix", "section", "right"),
    [
        ("nme", "", JobSpec, "did you mean name?"),
        ("cpus-per-task", "resources.", "resources", "did you mean resources.cpus_per_task?"),
        ("nodes", "", JobSpec, "did you mean resources.nodes?"),
        ("every_steps", "train.", TrainConfig, "did you mean train.eval.every_steps or "),
        ("qqq", "", BatchConfig, "known here: per_rank, global, accumulate"),
    ],
)
def test_did_you_mean_a_key(given: str, prefix: str, section: object, right: str) -> None:
    kind = fields_of(JobSpec)["resources"].kind if section == "resources" else section
    assert did_you_mean_key(given, kind, prefix, JobSpec).startswith(right)  # type: ignore[arg-type]


def test_did_you_mean_a_name() -> None:
    assert did_you_mean("digit", ["digits", "text"]) == "did you mean digits?"
    assert did_you_mean("q", ["digits", "text"]) == "known here: digits, text"


def test_words_for_types() -> None:
    assert words(Literal["a", "b"]) == "one of a, b"
    assert words(list[float]) + example(list[float]) == "a list such as [0.9, 0.999]"
    assert words(dict[str, str]) + example(dict[str, str]) == "a mapping: keys below it, indented"
    assert words(int) + example(int) == "a whole number such as 4"
    assert words(bool) + example(bool) == "true or false"
