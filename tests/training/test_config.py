"""The train section goes from plain mappings to dataclasses and back without loss, under its YAML keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from training.config import BatchConfig, RunConfig, TrainConfig, WandbConfig, from_plain, inner_types, load, to_plain

HOME = Path(__file__).parents[2]


def test_the_batch_keyword_is_global_in_yaml() -> None:
    assert to_plain(BatchConfig(per_rank=32, global_size=128)) == {"per_rank": 32, "global": 128, "accumulate": None}
    assert from_plain(BatchConfig, {"global": 128}).global_size == 128
    assert from_plain(BatchConfig, {"global_size": 128}).global_size is None


@given(st.builds(RunConfig, name=st.text(), train=st.builds(TrainConfig, options=st.just({"a": [1]}))))
def test_plain_and_back_is_the_same_config(config: RunConfig) -> None:
    assert from_plain(RunConfig, to_plain(config)) == config


def test_what_is_left_out_has_its_default_and_foreign_sections_are_ignored() -> None:
    config = from_plain(RunConfig, {"name": "a", "resources": {"nodes": 2}, "train": {"task": "digits", "seed": 7}})
    assert config == RunConfig("a", TrainConfig(task="digits", seed=7))
    assert config.wandb is None
    assert from_plain(RunConfig, {"name": "a", "train": {}, "wandb": {"tags": ["x"]}}).wandb == WandbConfig(tags=["x"])


def test_two_configs_share_no_lists() -> None:
    assert TrainConfig().optim.betas is not TrainConfig().optim.betas


def test_a_value_where_a_section_belongs_is_named() -> None:
    with pytest.raises(TypeError, match="optim: a section is needed, not 'adam'"):
        from_plain(TrainConfig, {"optim": "adam"})


def test_an_optional_type_without_its_none() -> None:
    assert inner_types(int | None) == (int,)
    assert inner_types(int | str) == (int, str)
    assert inner_types(float) == (float,)


def test_a_resolved_spec_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    config = RunConfig("ä: b", TrainConfig(task="digits", batch=BatchConfig(global_size=64)), WandbConfig())
    path.write_text(yaml.safe_dump(to_plain(config), allow_unicode=True), encoding="utf-8")
    assert load(path) == config


@pytest.mark.parametrize("text", ["", "name: a", "name: a\ntrain: digits", "- a"])
def test_a_spec_without_a_train_section_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "spec.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"spec\.yaml: no `train` section"):
        load(tmp_path / "spec.yaml")


def test_it_needs_no_torch() -> None:
    code = "import sys, training.config, training.runfolder, training.ranks; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=HOME, check=True, timeout=60)
